"""Trains the debug Llama with each transport of FSDP2's gradients, from several seeds; compares.

    python -m scripts.train.compare_transports --write --assert

Every run has 4 ranks with one thread each, under torchrun, and computes in bf16. The runs of one
seed have the same weights and data, and differ in how gradients travel alone. The runs stay in
--out.
"""

import argparse
import os
import sys
from pathlib import Path

from scripts.common.candidates import BF16
from scripts.common.report import Check, finish, make_parser, start
from scripts.train.seeded_runs import (
    Losses,
    Variants,
    add_options,
    check_options,
    difference,
    losses_of,
    results_table,
)

RANKS = 4
MAX_TO_FP32 = 0.3  # of bf16, in %; float8 is reported, not judged
FP32 = "fp32"
VARIANTS: Variants = {
    FP32: {},
    "bf16": {"gradient_transport": "bf16"},
    "float8": {"gradient_transport": "float8"},
    "float8, error feedback": {"gradient_transport": "float8", "error_feedback": True},
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; errors end the process with status 2, before any run starts."""
    asserts = "bf16 is too far from fp32"
    parser = make_parser(
        "scripts.train.compare_transports", __doc__, "numerics.md", asserts=asserts
    )
    jobs = max((os.cpu_count() or 1) // RANKS, 1)
    add_options(parser, steps=1000, jobs=jobs, out=Path("runs/transports"))
    args = start(parser, argv)
    check_options(parser, args)
    if args.batch_size % RANKS:
        parser.error(f"--batch-size must be a multiple of the {RANKS} ranks")
    return args


def checks(losses: Losses) -> list[Check]:
    """The condition of `--assert`. (Written so that a NaN breaks it.)"""
    mean, error = difference(losses, BF16, FP32)
    sentence = f"bf16 differs from fp32 by {mean:+.3f} % ± {error:.3f} %"
    return [Check(f"{sentence}, at most {MAX_TO_FP32:.3g} %", abs(mean) <= MAX_TO_FP32)]


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(argv)
    variants = {name: {"recipe": BF16, **options} for name, options in VARIANTS.items()}
    losses = losses_of(args, variants, RANKS)
    shown = results_table(losses, FP32, "gradients on the wire", spread=True)
    return finish(args, {"losses by transport": shown}, checks(losses))


if __name__ == "__main__":
    sys.exit(main())
