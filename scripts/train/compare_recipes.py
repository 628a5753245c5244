"""Trains the debug Llama in bf16 and with every float8 recipe, from several seeds, and compares.

    python -m scripts.train.compare_recipes --assert

Every run is a process of its own with one thread; --jobs of them run at a time. A seed gives a run
its weights and its data, so that the runs of one seed differ in their recipe alone: differences
are taken between these. The runs stay in --out.
"""

import argparse
import os
import sys
from pathlib import Path

from scripts.common.candidates import BF16, OURS
from scripts.common.report import Check, finish, make_parser, start
from scripts.train.seeded_runs import (
    Losses,
    add_options,
    check_options,
    difference,
    losses_of,
    results_table,
)

# The largest differences that pass, in %: of a recipe to bf16; of recipes with scales of blocks to
# bf16; of rowwise_folded to rowwise, unless two standard errors are more.
MAX_TO_BF16 = 1.0
MAX_OF_BLOCKS = {"blockwise": 0.3, "mxfp8": 0.3}
MAX_TO_ROWWISE = 0.3
FOLDED, ROWWISE = "rowwise_folded", "rowwise"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; errors end the process with status 2, before any run starts."""
    asserts = "a recipe is too far from bf16, or rowwise_folded from rowwise"
    parser = make_parser("scripts.train.compare_recipes", __doc__, asserts=asserts)
    parser.add_argument(
        "--recipes", nargs="+", choices=OURS, default=OURS, help="default: all of float8"
    )
    add_options(parser, steps=300, jobs=os.cpu_count() or 1, out=Path("runs/recipes"))
    args = start(parser, argv)
    check_options(parser, args)
    return args


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


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(argv)
    losses = losses_of(args, {recipe: {"recipe": recipe} for recipe in (BF16, *args.recipes)})
    return finish(args, {"losses": results_table(losses, BF16, "recipe")}, checks(losses))


if __name__ == "__main__":
    sys.exit(main())
