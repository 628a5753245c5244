"""Times forward and backward of a layer of experts beside bf16's, and of one linear layer likewise.

    python -m scripts.bench.experts --assert 1.1

Each expert has as many tokens as the linear layer, which has the same casts. Every operand is cast,
the weights too: ``grouped_linear`` keeps none, and a linear layer's weight has just changed. The
last column is below 1 if experts are, beside bf16's, faster than the linear layer beside nn.Linear.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from fp8_dist import Float8Linear
from fp8_dist.moe.config import ExpertsRecipe
from scripts.bench import timing
from scripts.bench.layers import Experts, layer_of, shape_text
from scripts.bench.timing import Timed
from scripts.common import report
from scripts.common.candidates import BF16
from scripts.common.markdown import table
from scripts.common.options import positive

RECIPES: tuple[str, ...] = get_args(ExpertsRecipe)


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median seconds of experts and of a linear layer, by candidate."""
    timed = {}
    rows, *features = args.shape
    for name in (BF16, *RECIPES):
        experts = Experts(name, args.experts * [rows], features, args.device)
        timed[f"experts {name}"] = Timed(experts.run, experts.clear)
        layer = layer_of(BF16, args.shape, args.device)
        if experts.config is not None:
            layer.module = Float8Linear.from_float(layer.module, experts.config.linear)
        timed[f"linear {name}"] = Timed(layer.run, layer.change_weight)
    found = timing.medians(timed, args, description=shape_text(args.shape))
    kinds = ("experts", "linear")
    return {kind: {n: found[f"{kind} {n}"] for n in (BF16, *RECIPES)} for kind in kinds}


def slowdowns(found: dict[str, dict[str, float]], name: str) -> tuple[float, float]:
    """The time of a candidate's experts, and of its linear layer, over that of bf16's."""
    experts, linear = (found[kind][name] / found[kind][BF16] for kind in ("experts", "linear"))
    return experts, linear


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = report.make_parser("scripts.bench.experts", __doc__, repeat=11)
    shape = "rows of an expert x in_features x out_features; default: 512x1024x2816"
    default = (512, 1024, 2816)
    parser.add_argument(
        "--shape", type=timing.shape_type, metavar="MxKxN", default=default, help=shape
    )
    parser.add_argument("--experts", type=positive, default=8, help="their number; %(default)s")
    asserts = (
        "fail unless experts take at most so many times what linear layers do, each beside bf16"
    )
    parser.add_argument("--assert", dest="asserted", type=float, metavar="RATIO", help=asserts)
    args = report.start(parser, argv)
    found, lines, checks = measure(args), [], []
    for name in (BF16, *RECIPES):
        times, (experts, linear) = [found[kind][name] for kind in found], slowdowns(found, name)
        cells = [f"{experts:.2f}x", f"{linear:.2f}x", f"{experts / linear:.2f}"]
        lines.append([name, *map(timing.milliseconds, times), *cells])
        if args.asserted:
            sentence = f"{name}: {experts / linear:.2f}, at most {args.asserted:g}"
            checks.append(report.Check(sentence, experts / linear <= args.asserted))
    header = ["candidate", "experts, ms", "linear, ms", "experts x bf16", "linear x bf16", "ratio"]
    title = f"{args.experts} experts {shape_text(args.shape)}"
    return report.finish(args, {title: table(header, lines, "lr")}, checks)


if __name__ == "__main__":
    sys.exit(main())
