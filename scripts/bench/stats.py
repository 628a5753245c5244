"""Times a training step with the statistics of ``float8_stats`` recorded, beside one without.

    python -m scripts.bench.stats --mesh none dp=2 tp=2
    python -m scripts.bench.stats --model 1b --layers 1 --batch-size 8 --assert 1.5

A step is that of scripts.bench.step. "off": outside of any `float8_stats`. "entered": inside of
one that does not record this step. "on": recorded, and combined over all ranks. "with GEMMs": with
the SQNR of each GEMM, too. `--assert RATIO`: "on" takes at most so many times the step without.

Statistics cost a time per element of an operand, GEMMs one per element and hidden size: the wider
the model, the less of a step they are.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

from fp8_dist.debug import Float8Stats, float8_stats
from scripts.bench import timing
from scripts.bench.step import Mesh, on_meshes, prepare, sizes_of, step_of, step_parser
from scripts.common.candidates import OURS
from scripts.common.markdown import table
from scripts.common.report import Check, finish, start

KINDS = ("off", "entered", "on", "with GEMMs")
ByRecipe = dict[str, dict[str, float]]  # median seconds, by recipe and kind


def recorded(stats: Float8Stats, number: int, step: Callable[[], None]) -> None:
    """A step of a number inside of statistics."""
    with stats.at(number):
        step()
    stats.rows.clear()


def measure(args: argparse.Namespace, axes: Mesh) -> dict[str, ByRecipe]:
    """Figures by model; called on every rank."""
    mesh, batch = prepare(axes, args)
    found: dict[str, ByRecipe] = {name: {} for name in args.model}
    for name, by_recipe in found.items():
        for recipe in args.recipes:
            model, step = step_of(recipe, sizes_of(name, args), mesh, args, batch)
            each, gemms = float8_stats(model, every=2), float8_stats(model, gemms=True)
            runs = (
                step,
                partial(recorded, each, 1, step),
                partial(recorded, each, 0, step),
                partial(recorded, gemms, 0, step),
            )
            timed = {kind: timing.Timed(run) for kind, run in zip(KINDS, runs, strict=True)}
            by_recipe[recipe] = timing.medians(timed, args, warm_up=2, description=recipe)
    return found


def stats_table(seconds: ByRecipe) -> str:
    """A row per recipe."""
    lines = [
        [recipe, timing.milliseconds(by_kind["off"])]
        + [timing.ratio(by_kind[kind], by_kind["off"]) for kind in KINDS[1:]]
        for recipe, by_kind in seconds.items()
    ]
    return table(["recipe", "ms, off", *KINDS[1:]], lines, "lr")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = step_parser("scripts.bench.stats", __doc__, repeat=5)
    add = parser.add_argument
    add("--recipes", choices=OURS, nargs="+", default=list(OURS), help="default: all")
    asserts = "fail unless a recorded step takes at most so many times one without"
    add("--assert", dest="asserted", type=float, metavar="RATIO", help=asserts)
    args = start(parser, argv)
    runs: dict[str, ByRecipe] = dict(on_meshes(args, partial(measure, args)))
    checks = []
    for name, seconds in runs.items() if args.asserted else ():
        for recipe, by_kind in seconds.items():
            found = by_kind["on"] / by_kind["off"]
            what = f"{name}, {recipe}: {found:.2f} of a step, at most {args.asserted:g}"
            checks.append(Check(what, found <= args.asserted))
    return finish(args, {f"statistics {name}": stats_table(runs[name]) for name in runs}, checks)


if __name__ == "__main__":
    sys.exit(main())
