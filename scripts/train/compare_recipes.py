"""Trains the debug Llama in bf16 and with every float8 recipe, from several seeds, and compares.

    python -m scripts.train.compare_recipes --write --assert

Every run is a process of its own with one thread; --jobs of them run at a time. A seed gives a run
its weights and its data, so that the runs of one seed differ in their recipe alone: differences
are taken between these. The runs stay in --out.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
from tqdm import tqdm

from scripts.common.candidates import BF16, OURS
from scripts.common.markdown import table
from scripts.common.options import positive
from scripts.common.report import Check, finish, make_parser, start

LAST_STEPS = 50
# The largest differences that pass, in %: of a recipe to bf16; of recipes with scales of blocks to
# bf16; of rowwise_folded to rowwise, unless two standard errors are more.
MAX_TO_BF16 = 1.0
MAX_OF_BLOCKS = {"blockwise": 0.3, "mxfp8": 0.3}
MAX_TO_ROWWISE = 0.3
FOLDED, ROWWISE = "rowwise_folded", "rowwise"
TRAIN = ("steps", "batch_size", "seq_len", "lr")  # options that every run gets

# The losses of all steps of each seed's run, by recipe; bf16 is among them.
Losses = dict[str, list[list[float]]]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; errors end the process with status 2, before any run starts."""
    asserts = "a recipe is too far from bf16, or rowwise_folded from rowwise"
    parser = make_parser("scripts.train.compare_recipes", __doc__, "recipes.md", asserts=asserts)
    add = parser.add_argument
    add("--recipes", nargs="+", choices=OURS, default=OURS, help="default: all of float8")
    add("--steps", type=positive, default=300)
    add("--seeds", type=positive, default=5, help="runs of each recipe, at least 2")
    add("--batch-size", type=positive, default=8, help="rows of a batch")
    add("--seq-len", type=positive, default=64, help="tokens (bytes) per row")
    # With so few tokens per step scripts.train.train's 1e-3 is at the edge of stability, where runs
    # that differ in a rounding drift apart, and twice as far as with this one.
    add("--lr", type=float, default=5e-4, help="peak of the learning rate")
    add("--jobs", type=positive, default=os.cpu_count(), help="runs at a time; default: all cores")
    add("--out", type=Path, default=Path("runs/recipes"), help="folder of the runs")
    args = start(parser, argv)
    if args.seeds < 2:
        parser.error("--seeds must be at least 2: differences have a standard error")
    return args


def train(args: argparse.Namespace, recipe: str, seed: int) -> list[float]:
    """Trains, and returns the loss of every step.

    Raises:
        SystemExit: the run did not end well.
    """
    out = args.out / f"{recipe}-{seed}"
    options = {name: getattr(args, name) for name in TRAIN}
    options |= {"recipe": recipe, "seed": seed, "out": out}
    command = [sys.executable, "-m", "scripts.train.train"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} did not end well:\n{done.stderr[-2000:]}")
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").open()]


def losses_of(args: argparse.Namespace) -> Losses:
    """Trains with every recipe from every seed, `--jobs` runs at a time."""
    recipes = (BF16, *args.recipes)
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            (recipe, pool.submit(train, args, recipe, seed))
            for seed in range(args.seeds)
            for recipe in recipes
        ]
        try:
            for future in tqdm(as_completed(run for _, run in runs), total=len(runs), unit="run"):
                future.result()  # an error ends it all
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {recipe: [run.result() for name, run in runs if name == recipe] for recipe in recipes}


def last_loss(losses: list[float]) -> float:
    """The mean of the last steps, or of all if there are fewer."""
    return statistics.fmean(losses[-LAST_STEPS:])


def difference(losses: Losses, recipe: str, reference: str) -> tuple[float, float]:
    """Of the last losses of two recipes, in %: the mean over seeds, and its standard error."""
    values, references = (np.array([*map(last_loss, losses[r])]) for r in (recipe, reference))
    percent = 100 * (values / references - 1)
    return float(percent.mean()), float(percent.std(ddof=1)) / len(percent) ** 0.5


def checks(losses: Losses) -> list[Check]:
    """The conditions of `--assert`. (Written so that a NaN breaks them.)"""
    pairs = [
        (recipe, BF16, MAX_OF_BLOCKS.get(recipe, MAX_TO_BF16))
        for recipe in losses
        if recipe != BF16
    ]
    if FOLDED in losses and ROWWISE in losses:
        _, error = difference(losses, FOLDED, ROWWISE)
        pairs.append((FOLDED, ROWWISE, max(MAX_TO_ROWWISE, 2 * error)))
    found = []
    for recipe, reference, most in pairs:
        mean, error = difference(losses, recipe, reference)
        sentence = f"{recipe} differs from {reference} by {mean:+.3f} % ± {error:.3f} %"
        found.append(Check(f"{sentence}, at most {most:.3g} %", abs(mean) <= most))
    return found


def results_table(losses: Losses) -> str:
    """The mean loss of each recipe and its difference to bf16."""
    lines = []
    for recipe, runs in losses.items():
        mean, error = difference(losses, recipe, BF16)
        cells = ["", ""] if recipe == BF16 else [f"{mean:+.3f} %", f"{error:.3f} %"]
        lines.append([recipe, f"{statistics.fmean(map(last_loss, runs)):.4f}", *cells])
    head = ["recipe", f"loss, last {LAST_STEPS} steps", "difference to bf16", "its standard error"]
    return table(head, lines, "lr")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(argv)
    losses = losses_of(args)
    return finish(args, {"losses": results_table(losses)}, checks(losses))


if __name__ == "__main__":
    sys.exit(main())
