"""Trains the debug Llama in bf16 and with every float8 recipe, from several seeds, and compares.

    python scripts/compare_recipes.py --write --assert

Every run is a process of its own with one thread; --jobs of them run at a time. A seed gives a run
its weights and its data, so that the runs of one seed differ in their recipe alone: differences
are taken between these. Finished runs stay in --out and are used again when the same options are
asked for, also after the library has changed: delete the folder to train anew.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from options import BF16, RECIPES, make_parser, parse_options
from recipe_results import Losses, page, plot, problems, results_table, verdict
from tqdm import tqdm

SCRIPTS = Path(__file__).resolve().parent
PAGE = SCRIPTS.parent / "docs" / "recipes.md"
MODEL = "debug"


class Run(NamedTuple):
    """A run of scripts/train.py.

    Attributes:
        recipe, seed: what it is called.
        options: of scripts/train.py.
        out: its folder.
        config: what the config.json of this very run says, among other things.
    """

    recipe: str
    seed: int
    options: list[str]
    out: Path
    config: dict[str, Any]

    def losses(self) -> list[float] | None:
        """The loss of every step, if the run is finished and had the options asked for."""
        try:
            config = json.loads((self.out / "config.json").read_text())
            lines = (self.out / "metrics.jsonl").read_text().splitlines()
            losses = [json.loads(line)["loss"] for line in lines]
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        same = config.items() >= self.config.items() and len(losses) == config["steps"]
        return losses if same else None

    def train(self) -> list[float]:
        """Trains, and returns the loss of every step.

        Raises:
            SystemExit: it did not end well.
        """
        command = [sys.executable, str(SCRIPTS / "train.py"), *self.options]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        losses = self.losses()
        if done.returncode or losses is None:
            raise SystemExit(f"{shlex.join(command)} did not end well:\n{done.stderr[-2000:]}")
        return losses


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the options of this script; errors end the process with status 2."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    float8 = [recipe for recipe in RECIPES if recipe != BF16]
    add("--recipes", nargs="+", choices=float8, default=float8, help="default: all of float8")
    add("--steps", type=int, default=300)
    add("--seeds", type=int, default=5, help="runs of each recipe, at least 2")
    add("--batch-size", type=int, default=8, help="rows of a batch")
    add("--seq-len", type=int, default=64, help="tokens (bytes) per row")
    # With so few tokens per step scripts/train.py's 1e-3 is at the edge of stability, where runs
    # that differ in a rounding drift apart, and twice as far as with this one.
    add("--lr", type=float, default=5e-4, help="peak of the learning rate")
    add("--data", type=Path, help="file or folder; default: Python's standard library source")
    add("--jobs", type=int, default=os.cpu_count(), help="runs at a time; default: all cores")
    add("--out", type=Path, default=Path("runs/recipes"), help="folder of the runs")
    add("--write", action="store_true", help="make docs/recipes.md and docs/recipes.png")
    add("--assert", dest="strict", action="store_true", help="fail when the verdict is bad")
    args = parser.parse_args(argv)
    for name, least in (("seeds", 2), ("jobs", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}")
    return args


def planned_runs(args: argparse.Namespace) -> list[Run]:
    """The runs to compare, in the order in which they start; checks the options that they take."""
    shared = [f"--model={MODEL}", f"--steps={args.steps}", f"--batch-size={args.batch_size}"]
    shared += [f"--seq-len={args.seq_len}", f"--lr={args.lr}"]
    if args.data is not None:
        shared.append(f"--data={args.data}")
    parser = make_parser(None, prog="compare_recipes.py")
    config = vars(parse_options(parser, [*shared, f"--out={args.out}"], world_size=1))
    corpus = config.pop("corpus")
    config |= {"data": corpus.source, "data_bytes": corpus.tokens.numel()}
    config |= {"device": device(), "torch": torch.__version__}
    folder = args.out / f"{args.steps}x{args.batch_size}x{args.seq_len}-lr{args.lr:g}"
    runs = []
    for seed in range(args.seeds):
        for recipe in (BF16, *args.recipes):
            out = folder / f"{recipe}-{seed}"
            own = {"recipe": recipe, "seed": seed, "out": str(out)}
            options = [*shared, *(f"--{name}={value}" for name, value in own.items())]
            runs.append(Run(recipe, seed, options, out, config | own))
    return runs


def device() -> str:
    """Where a run trains, being one process."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def losses_of(runs: list[Run], jobs: int) -> Losses:
    """Trains what is not finished yet; returns the losses of all runs."""
    found = {run.out: run.losses() for run in runs}
    missing = [run for run in runs if found[run.out] is None]
    finished = len(runs) - len(missing)
    if finished:
        print(f"{finished} of {len(runs)} runs are finished already, in {runs[0].out.parent}")
    with (
        ThreadPoolExecutor(jobs) as pool,
        tqdm(total=len(runs), initial=finished, unit="run") as progress,
    ):
        running = {pool.submit(run.train): run for run in missing}
        try:
            for future in as_completed(running):
                run = running[future]
                found[run.out] = future.result()
                progress.set_postfix_str(f"{run.recipe}, seed {run.seed}", refresh=False)
                progress.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    by_recipe: Losses = {}
    for run in runs:
        losses = found[run.out]
        assert losses is not None
        by_recipe.setdefault(run.recipe, []).append(losses)
    return by_recipe


def write_page(args: argparse.Namespace, losses: Losses) -> None:
    """Makes the page and its plot."""
    options = {name: getattr(args, name) for name in ("steps", "seeds", "batch_size", "seq_len")}
    shown = [f"--{name.replace('_', '-')} {value}" for name, value in options.items()]
    text = page(
        losses,
        **options,
        lr=args.lr,
        model=MODEL,
        text="the source of Python's standard library" if args.data is None else args.data.name,
        where="CPU, where float8 GEMMs are emulated" if device() == "cpu" else "GPU",
        torch=torch.__version__.partition("+")[0],
        command=f"python scripts/compare_recipes.py {' '.join(shown)} --lr {args.lr:g} --write",
    )
    PAGE.write_text(text)
    plot(losses, PAGE.with_suffix(".png"))
    print(f"written: {PAGE}, {PAGE.with_suffix('.png')}")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse_args(argv)
    losses = losses_of(planned_runs(args), args.jobs)
    print(results_table(losses))
    print(verdict(losses))
    if args.write:
        write_page(args, losses)
    return 1 if args.strict and problems(losses) else 0


if __name__ == "__main__":
    sys.exit(main())
