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
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from fp8_dist.debug import Float8Stats, float8_stats
from scripts.bench import timing
from scripts.bench.step import ATTENTION, Mesh
from scripts.common.candidates import OURS
from scripts.common.llama import MODELS
from scripts.common.markdown import table
from scripts.common.models import after_step, build
from scripts.common.options import mesh_text, mesh_type, positive
from scripts.common.ranks import run_on_ranks
from scripts.common.report import Check, finish, make_parser, start

KINDS = ("off", "entered", "on", "with GEMMs")


def measure(axes: Mesh, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median seconds of a step by recipe and kind; called on every rank."""
    mesh = None
    if dist.is_initialized():
        mesh = init_device_mesh(args.device, (*axes.values(),), mesh_dim_names=(*axes,))
    generator = torch.Generator().manual_seed(0 if mesh is None else mesh.get_local_rank("dp"))
    tokens = torch.randint(256, (2, args.batch_size, args.seq_len), generator=generator)
    inputs, targets = tokens.to(args.device)
    found = {}
    for recipe in args.recipes:
        sizes = MODELS[args.model]
        if args.layers is not None:
            sizes = replace(sizes, n_layers=args.layers, vocab_size=256)
        model = build(recipe, sizes, mesh, args.device, compiled=args.compile)
        for block in model.layers:
            block.attention.dtype = ATTENTION.get(args.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        after = after_step(recipe, sharded=mesh is not None and mesh["dp"].size() > 1)

        def step(
            model: torch.nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
            after: Callable[[torch.nn.Module], None] = after,
        ) -> None:
            after(model)
            logits = model(inputs)
            F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

        def recorded(stats: Float8Stats, number: int, step: Callable[[], None] = step) -> None:
            with stats.at(number):
                step()
            stats.rows.clear()

        each, gemms = float8_stats(model, every=2), float8_stats(model, gemms=True)
        kinds = (step, partial(recorded, each, 1), partial(recorded, each, 0))
        runs = dict(zip(KINDS, (*kinds, partial(recorded, gemms, 0)), strict=True))
        timed = {kind: timing.Timed(run) for kind, run in runs.items()}
        found[recipe] = timing.medians(timed, args, warm_up=2, description=recipe)
    return found


def stats_table(seconds: dict[str, dict[str, float]]) -> str:
    """A row per recipe."""
    lines = [
        [recipe, timing.milliseconds(by_kind["off"])]
        + [timing.ratio(by_kind[kind], by_kind["off"]) for kind in KINDS[1:]]
        for recipe, by_kind in seconds.items()
    ]
    return table(["recipe", "ms, off", *KINDS[1:]], lines, "lr")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = make_parser("scripts.bench.stats", __doc__, repeat=5)
    add = parser.add_argument
    add("--model", choices=MODELS, default="debug", help="default: %(default)s")
    add("--layers", type=positive, help="so many of its layers, with 256 tokens to predict")
    add("--recipes", choices=OURS, nargs="+", default=list(OURS), help="default: all")
    add("--mesh", type=mesh_type, nargs="+", default=[mesh_type("none")], help="default: none")
    add("--batch-size", type=positive, default=64, help="rows per rank of dp; %(default)s")
    add("--seq-len", type=positive, default=128, help="tokens per row; %(default)s")
    add("--compile", action="store_true", help="torch.compile each block")
    asserts = "fail unless a recorded step takes at most so many times one without"
    add("--assert", dest="asserted", type=float, metavar="RATIO", help=asserts)
    return start(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(argv)
    blocks, checks = {}, []
    for mesh in args.mesh:
        task = partial(measure, mesh, args)
        ranks, options = math.prod(mesh.values()), {"device": args.device, "threads": args.threads}
        seconds = task() if ranks == 1 else run_on_ranks(ranks, task, **options)[0]
        some = "" if args.layers is None else f" x {args.layers}"
        name = f"statistics {args.model}{some} {mesh_text(mesh)}{' compiled' * args.compile}"
        blocks[name] = stats_table(seconds)
        for recipe, by_kind in seconds.items() if args.asserted else ():
            found = by_kind["on"] / by_kind["off"]
            what = f"{name}, {recipe}: {found:.2f} of a step, at most {args.asserted:g}"
            checks.append(Check(what, found <= args.asserted))
    return finish(args, blocks, checks)


if __name__ == "__main__":
    sys.exit(main())
