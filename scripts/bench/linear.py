"""Times forward and backward of one linear layer beside nn.Linear and torchao, in one run.

    python -m scripts.bench.linear --shapes 512x1024x1024 --assert 3
    python -m scripts.bench.linear --shapes 16x16x16 --assert 2

Every operand is cast, once or as often as the library does; torchao casts its weight in forward and
backward. In the smallest shape all is overhead. (CPUs with AMX run bf16 GEMMs and torchao's float8
GEMMs in tiles: there our layer is 2.5 times as fast as torchao's in the first command.)
"""

import argparse
import math
import sys
from collections.abc import Sequence

from scripts.bench import timing
from scripts.bench.layers import Shape, layer_of, shape_text
from scripts.bench.timing import Timed
from scripts.common.report import start


def measure(shape: Shape, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of all candidates at one shape."""
    timed = {}
    for name in args.candidates:
        layer = layer_of(name, shape, args.device)
        timed[name] = Timed(layer.run, layer.change_weight)
    calls = max(1, min(50, 10**7 // math.prod(shape)))  # of what takes microseconds
    return timing.medians(timed, args, calls=calls, description=shape_text(shape))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = timing.make_parser("scripts.bench.linear", __doc__, repeat=21)
    shapes = "rows x in_features x out_features; default: 512x1024x1024 16x16x16"
    default = [(512, 1024, 1024), (16, 16, 16)]
    parser.add_argument(
        "--shapes", type=timing.shape_type, nargs="+", metavar="MxKxN", default=default, help=shapes
    )
    timing.add_candidates(parser)
    args = start(parser, argv)
    found = {f"linear {shape_text(shape)}": measure(shape, args) for shape in args.shapes}
    return timing.finish(args, found)


if __name__ == "__main__":
    sys.exit(main())
