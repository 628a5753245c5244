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

from scripts.common.blocks import DOCS, replace_block
from scripts.common.candidates import BF16, OURS
from scripts.common.corpus import load_corpus
from scripts.common.markdown import table
from scripts.common.options import command_parser, positive

PAGE = DOCS / "recipes.md"
LAST_STEPS = 50
# The largest differences that pass, in %: of a recipe to bf16; of rowwise_folded to rowwise, unless
# two standard errors are more.
MAX_TO_BF16 = 1.0
MAX_TO_ROWWISE = 0.3
FOLDED, ROWWISE = "rowwise_folded", "rowwise"

# The losses of all steps of each seed's run, by recipe; bf16 is among them.
Losses = dict[str, list[list[float]]]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; errors end the process with status 2, before any run starts."""
    parser = command_parser("scripts.train.compare_recipes", __doc__)
    add = parser.add_argument
    add("--recipes", nargs="+", choices=OURS, default=OURS, help="default: all of float8")
    add("--steps", type=positive, default=300)
    add("--seeds", type=positive, default=5, help="runs of each recipe, at least 2")
    add("--batch-size", type=positive, default=8, help="rows of a batch")
    add("--seq-len", type=positive, default=64, help="tokens (bytes) per row")
    # With so few tokens per step scripts.train.train's 1e-3 is at the edge of stability, where runs
    # that differ in a rounding drift apart, and twice as far as with this one.
    add("--lr", type=float, default=5e-4, help="peak of the learning rate")
    add("--data", type=Path, help="file or folder; default: Python's standard library source")
    add("--jobs", type=positive, default=os.cpu_count(), help="runs at a time; default: all cores")
    add("--out", type=Path, default=Path("runs/recipes"), help="folder of the runs")
    add("--write", action="store_true", help="replace the tables of docs/recipes.md")
    add("--assert", dest="strict", action="store_true", help="fail when the verdict is bad")
    args = parser.parse_args(argv)
    if args.seeds < 2:
        parser.error("--seeds must be at least 2: differences have a standard error")
    try:
        load_corpus(args.data, seq_len=args.seq_len)
    except ValueError as error:
        parser.error(f"--data: {error}")
    return args


def train(args: argparse.Namespace, recipe: str, seed: int) -> list[float]:
    """Trains, and returns the loss of every step.

    Raises:
        SystemExit: the run did not end well.
    """
    out = args.out / f"{recipe}-{seed}"
    options = {name: getattr(args, name) for name in ("steps", "batch_size", "seq_len", "lr")}
    options |= {"recipe": recipe, "seed": seed, "out": out}
    options |= {} if args.data is None else {"data": args.data}
    command = [sys.executable, "-m", "scripts.train.train"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
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


def shown(mean: float, error: float) -> str:
    """A difference for people."""
    return f"{mean:+.3f} % ± {error:.3f} %"


def problems(losses: Losses) -> list[str]:
    """What is worse than it should be. (Written so that a NaN is a problem too.)"""
    pairs = [(recipe, BF16, MAX_TO_BF16) for recipe in losses]
    if FOLDED in losses and ROWWISE in losses:
        _, error = difference(losses, FOLDED, ROWWISE)
        pairs.append((FOLDED, ROWWISE, max(MAX_TO_ROWWISE, 2 * error)))
    return [
        f"{recipe} differs from {reference} by {shown(mean, error)}, more than {allowed:.3g} %"
        for recipe, reference, allowed in pairs
        for mean, error in [difference(losses, recipe, reference)]
        if not abs(mean) <= allowed
    ]


def results_table(losses: Losses) -> str:
    """The mean loss of each recipe and its difference to bf16."""
    lines = []
    for recipe, runs in losses.items():
        mean, error = difference(losses, recipe, BF16)
        cells = ["", ""] if recipe == BF16 else [f"{mean:+.3f} %", f"{error:.3f} %"]
        lines.append([recipe, f"{statistics.fmean(map(last_loss, runs)):.4f}", *cells])
    head = ["recipe", f"loss, last {LAST_STEPS} steps", "difference to bf16", "its standard error"]
    return table(head, lines, "lr")


def verdict(losses: Losses) -> str:
    """A sentence for people."""
    if bad := "; ".join(problems(losses)):
        return f"Not as expected: {bad}."
    text = f"Every recipe is within {MAX_TO_BF16:g} % of bf16."
    if FOLDED in losses and ROWWISE in losses:
        text += (
            f" {FOLDED} differs from {ROWWISE} by {shown(*difference(losses, FOLDED, ROWWISE))}."
        )
    return text


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(argv)
    losses = losses_of(args)
    text = f"{results_table(losses)}\n\n{verdict(losses)}"
    print(text)
    if args.write:
        replace_block(PAGE, "losses", text)
    return 1 if args.strict and problems(losses) else 0


if __name__ == "__main__":
    sys.exit(main())
