"""Count the library's own calls in one call: how much is there to follow?

    python -m scripts.measure.walk
    python -m scripts.measure.walk --only "plain layer, forward" --calls

For real calls of a small model on the CPU, with two ranks of which one runs: the calls of functions
of the library, how many different functions and files they reach, and how often the reader moves
from one file to another ("stays"). Comprehensions are calls up to Python 3.11.
"""

import argparse

from scripts.common.options import command_parser
from scripts.common.report import run

WALKS = (
    "plain layer, forward",
    "plain layer, backward",
    "FSDP2, two layers, forward, casts kept",
    "FSDP2, two layers, backward",
    "FSDP2, update of two weights",
    "FSDP2, gather of one weight, cast kept",
    "FSDP2, gather of one weight, stale",
    "TP and SP feed-forward, forward",
    "TP and SP feed-forward, backward",
)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = command_parser("scripts.measure.walk", __doc__)
    parser.add_argument("--only", choices=WALKS, help="one of the calls; default: all")
    parser.add_argument("--calls", action="store_true", help="list each call, indented by depth")
    parser.set_defaults(device="cpu", threads=1)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    return run("scripts.measure.walk_run", parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
