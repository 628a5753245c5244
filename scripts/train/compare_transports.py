"""Trains the debug Llama with each transport of its sums over ranks, from several seeds; compares.

    python -m scripts.train.compare_transports --assert
    python -m scripts.train.compare_transports --of fp32-compute --assert
    python -m scripts.train.compare_transports --of tensor-parallel --assert

The sums are those of FSDP2's gradients on 4 ranks, after a backward in bf16 or, with fp32-compute,
in fp32; or those of tensor parallelism on 2 ranks, in tensorwise. Ranks run under torchrun, one
thread each. The runs of one seed have the same weights and data, and differ in a transport alone.
They stay in --out.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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

FP32 = "fp32"
REDUCE_SCATTER = "reduce-scatter"  # torch's


class Comparison(NamedTuple):
    """Runs that differ in one transport."""

    block: str  # of the page
    what: str  # travels
    ranks: int
    options: Mapping[str, Any]  # that all runs have
    variants: Variants
    reference: str  # of the variants
    judged: str  # a variant, by `--assert`
    most: float  # that it may differ from the reference, in %


COMPARISONS = {
    "gradients": Comparison(
        block="losses by transport",
        what="gradients on the wire",
        ranks=4,
        options={"recipe": BF16},
        variants={
            FP32: {},
            "bf16": {"gradient_transport": "bf16"},
            "float8": {"gradient_transport": "float8"},
            "float8, error feedback": {"gradient_transport": "float8", "error_feedback": True},
        },
        reference=FP32,
        judged="bf16",
        most=0.3,
    ),
    # Gradients of a backward in bf16 are bf16 numbers: transport in bf16 rounds them here alone.
    "fp32-compute": Comparison(
        block="losses by transport, fp32 compute",
        what="gradients on the wire",
        ranks=4,
        options={"recipe": BF16, "compute": "fp32"},
        variants={FP32: {}, "bf16": {"gradient_transport": "bf16"}},
        reference=FP32,
        judged="bf16",
        most=0.3,
    ),
    # (Without bf16: the sum of two bf16 numbers has the same bits in either way.)
    "tensor-parallel": Comparison(
        block="losses by transport of tensor parallelism",
        what="sums of tensor parallelism",
        ranks=2,
        options={"recipe": "tensorwise", "tp": 2},
        variants={REDUCE_SCATTER: {}, "float8": {"reduce_transport": "float8"}},
        reference=REDUCE_SCATTER,
        judged="float8",
        most=0.5,
    ),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; errors end the process with status 2, before any run starts."""
    asserts = "bf16 (float8, of tensor parallelism) is too far from the reference"
    parser = make_parser("scripts.train.compare_transports", __doc__, asserts=asserts)
    jobs = max((os.cpu_count() or 1) // 4, 1)
    add_options(parser, steps=1000, jobs=jobs, out=Path("runs/transports"))
    parser.add_argument("--of", choices=COMPARISONS, default="gradients", help="which sums")
    args = start(parser, argv)
    check_options(parser, args)
    compared = COMPARISONS[args.of]
    ranks = compared.ranks // compared.options.get("tp", 1)
    if args.batch_size % ranks:
        parser.error(f"--batch-size must be a multiple of the {ranks} data-parallel ranks")
    return args


def checks(losses: Losses, compared: Comparison) -> list[Check]:
    """The condition of `--assert`. (Written so that a NaN breaks it.)"""
    judged, reference, most = compared.judged, compared.reference, compared.most
    mean, error = difference(losses, judged, reference)
    sentence = f"{judged} differs from {reference} by {mean:+.3f} % ± {error:.3f} %"
    return [Check(f"{sentence}, at most {most:.3g} %", abs(mean) <= most)]


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(argv)
    compared = COMPARISONS[args.of]
    args.out /= args.of
    variants = {name: {**compared.options, **own} for name, own in compared.variants.items()}
    losses = losses_of(args, variants, compared.ranks)
    shown = results_table(losses, compared.reference, compared.what, spread=True)
    return finish(args, {compared.block: shown}, checks(losses, compared))


if __name__ == "__main__":
    sys.exit(main())
