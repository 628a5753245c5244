"""Time forward and backward of one linear layer, compared with nn.Linear and torchao.

    python -m scripts.bench.linear --shapes 512x1024x1024 --assert 3
    python -m scripts.bench.linear --shapes 16x16x16 --assert 2

Operands are cast as often as in training; torchao casts the weight in both forward and backward.
The smallest shape measures overhead alone. (CPUs with AMX run bf16 GEMMs and torchao's float8 GEMMs
in tiles. There our layer is 2.5 times as fast as torchao's in the first command.)
"""

import argparse

from scripts.common.recipes import add_candidates
from scripts.common.report import make_parser, parse, run


def shape_type(text: str) -> tuple[int, int, int]:
    """Parse a shape MxKxN."""
    sizes = tuple(int(size) for size in text.split("x"))
    if len(sizes) != 3 or any(size < 1 or size % 16 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text}: expected MxKxN, positive multiples of 16")
    return sizes


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("scripts.bench.linear", __doc__, repeat=21, ratio=True)
    shapes = "rows x in_features x out_features; default: 512x1024x1024 16x16x16"
    default = [(512, 1024, 1024), (16, 16, 16)]
    parser.add_argument(
        "--shapes", type=shape_type, nargs="+", metavar="MxKxN", default=default, help=shapes
    )
    add_candidates(parser)
    return run("scripts.bench.layers", parse(parser, argv))


if __name__ == "__main__":
    raise SystemExit(main())
