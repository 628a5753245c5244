"""Trains the debug Llama with each transport of its sums over ranks, from several seeds; compares.

    python -m scripts.train.compare_transports --assert
    python -m scripts.train.compare_transports --of fp32-compute --assert
    python -m scripts.train.compare_transports --of tensor-parallel --assert

The sums are those of FSDP2's gradients on 4 ranks, after a backward in bf16 or, with fp32-compute,
in fp32; or those of tensor parallelism on 2 ranks, in tensorwise. Ranks run under torchrun, one
thread each. The runs of one seed have the same weights and data, and differ in a transport alone.
They stay in --out.
"""

import sys
from typing import Any

from scripts.common.candidates import BF16
from scripts.train.seeded_runs import Comparison, Limit, compare, options_parser, parse

FP32, REDUCE_SCATTER = "fp32", "reduce-scatter"  # torch's
IN_BF16: dict[str, Any] = {"recipe": BF16}
IN_FP32 = IN_BF16 | {"compute": "fp32"}
OVER_TP: dict[str, Any] = {"recipe": "tensorwise", "tp": 2}
COMPARISONS = {
    "gradients": Comparison(
        "gradients on the wire",
        {
            FP32: IN_BF16,
            "bf16": IN_BF16 | {"gradient_transport": "bf16"},
            "float8": IN_BF16 | {"gradient_transport": "float8"},
            "float8, error feedback": IN_BF16
            | {"gradient_transport": "float8", "error_feedback": True},
        },
        [Limit("bf16", FP32, 0.3)],
        ranks=4,
    ),
    # Gradients of a backward in bf16 are bf16 numbers: transport in bf16 rounds them here alone.
    "fp32-compute": Comparison(
        "gradients on the wire",
        {FP32: IN_FP32, "bf16": IN_FP32 | {"gradient_transport": "bf16"}},
        [Limit("bf16", FP32, 0.3)],
        ranks=4,
    ),
    # (Without bf16: the sum of two bf16 numbers has the same bits in either way.)
    "tensor-parallel": Comparison(
        "sums of tensor parallelism",
        {REDUCE_SCATTER: OVER_TP, "float8": OVER_TP | {"reduce_transport": "float8"}},
        [Limit("float8", REDUCE_SCATTER, 0.5)],
        ranks=2,
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    module = "scripts.train.compare_transports"
    parser = options_parser(module, __doc__, steps=1000, ranks=4, out="runs/transports")
    parser.add_argument("--of", choices=COMPARISONS, default="gradients", help="which sums")
    args = parse(parser, argv)
    compared = COMPARISONS[args.of]
    if compared.ranks == 4 and args.batch_size % 4:
        parser.error("--batch-size must be a multiple of the 4 data-parallel ranks")
    args.out /= args.of
    return compare(args, compared)


if __name__ == "__main__":
    sys.exit(main())
