"""Times the scaled GEMM beside torch._scaled_mm, a bf16 GEMM and torchao's, in one run.

    python -m scripts.bench.matmul --assert

The three GEMMs of a layer with in_features K and out_features N on M rows, with the operands that
they have in a step: x @ w.t(), g @ w and g.t() @ x, cast already. All candidates multiply the same
float8 bytes with the same scales. `--assert` fails where ours is slower than torch._scaled_mm or
torchao's, or further from the exact product than torch._scaled_mm.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import torch

from scripts.bench import timing
from scripts.bench.layers import Shape, layer_of
from scripts.common.candidates import BF16, TORCHAO
from scripts.common.gemms import GEMMS, Product, float8_gemms
from scripts.common.markdown import table
from scripts.common.metrics import sqnr
from scripts.common.report import Check, finish, make_parser, start

RECIPES = ("tensorwise", "rowwise")
LAYOUTS = dict(zip(GEMMS, ("x @ w.t()", "g @ w", "g.t() @ x"), strict=True))
OURS, NATIVE, PEER = "fp8_dist", "torch._scaled_mm", "torchao"
# By device: a small layer, then layers of Llama-3.2-1B and of Llama-3-8B and 70B.
SHAPES: dict[str, list[Shape]] = {
    "cpu": [(512, 1024, 1024), (512, 2048, 2048), (512, 2048, 8192), (512, 8192, 2048)],
    "cuda": [
        (8192, 4096, 4096),
        (8192, 4096, 14336),
        (8192, 14336, 4096),
        (8192, 8192, 8192),
        (8192, 8192, 28672),
        (8192, 28672, 8192),
    ],
}


@dataclasses.dataclass
class Row:
    """One GEMM: median seconds and decibels by candidate."""

    shape: Shape
    recipe: str
    gemm: str
    seconds: dict[str, float]
    decibels: dict[str, float]

    @property
    def label(self) -> str:
        """Names it among others."""
        return f"{timing.shape_text(self.shape)} {self.recipe} {LAYOUTS[self.gemm]}"


def native_of(product: Product) -> timing.Timed:
    """torch._scaled_mm on contiguous copies made beforehand: row-major by column-major."""
    left, right = product.a.contiguous(), product.b.t().contiguous().t()
    # A scale's dim of size 1 may have any stride, but this operator looks at it.
    strided = torch.contiguous_format
    scales = [s.clone(memory_format=strided) for s in (product.scale_a, product.scale_b)]
    return timing.Timed(lambda: torch._scaled_mm(left, right, *scales, out_dtype=torch.bfloat16))


def measure(shape: Shape, recipe: str, args: argparse.Namespace) -> list[Row]:
    """All candidates, for the three GEMMs of a layer."""
    layer = layer_of(recipe, shape, args.device)
    ours = float8_gemms(recipe, layer.run)
    peer = f"torchao {recipe}"
    theirs = float8_gemms(peer, layer_of(peer, shape, args.device).run) if peer in TORCHAO else {}
    x, w, g = layer.x.detach(), layer.module.weight.detach(), layer.grad
    high = {"output": (x, w.t()), "grad_input": (g, w), "grad_weight": (g.t(), x)}
    rows = []
    for gemm, product in ours.items():
        timed = {
            OURS: timing.Timed(product.run),
            NATIVE: native_of(product),
            BF16: timing.Timed(lambda pair=high[gemm]: torch.mm(*pair)),
        }
        if theirs:
            assert product.same_as(theirs[gemm])
            timed[PEER] = timing.Timed(theirs[gemm].run)
        exact = product.exact()
        decibels = {name: sqnr(exact, timed[name].run()) for name in timed if name != BF16}
        seconds = timing.medians(
            timed, args, description=f"{timing.shape_text(shape)} {recipe} {gemm}"
        )
        rows.append(Row(shape, recipe, gemm, seconds, decibels))
    return rows


def matmul_table(rows: Sequence[Row]) -> str:
    """A line per GEMM."""
    header = ["M x K x N", "scales", "GEMM", "ms", "bf16, ms", "x bf16"]
    header += [f"faster than {NATIVE}", f"faster than {PEER}", "dB"]
    header += [f"{NATIVE}, dB", f"{PEER}, dB"]
    lines = []
    for row in rows:
        ours, decibels = row.seconds[OURS], row.decibels
        line = [
            timing.shape_text(row.shape),
            row.recipe,
            LAYOUTS[row.gemm],
            timing.milliseconds(ours),
        ]
        line += [timing.milliseconds(row.seconds[BF16]), timing.ratio(ours, row.seconds[BF16])]
        line += [timing.ratio(row.seconds.get(name), ours) for name in (NATIVE, PEER)]
        line += [f"{decibels[n]:.2f}" if n in decibels else "" for n in (OURS, NATIVE, PEER)]
        lines.append(line)
    return table(header, lines, "lllr")


def checks(rows: Sequence[Row]) -> list[Check]:
    """The conditions of `--assert`, each said of the row that is closest to breaking it."""
    found = []
    for name in (NATIVE, PEER):
        if any(name not in row.seconds for row in rows):
            found.append(Check(f"{name} is installed", False))
            continue
        faster, label = min((row.seconds[name] / row.seconds[OURS], row.label) for row in rows)
        found.append(Check(f"{faster:.2f}x faster than {name} at {label}", faster >= 1))
    ahead, label = min((row.decibels[OURS] - row.decibels[NATIVE], row.label) for row in rows)
    sentence = f"{ahead:+.2f} dB to {NATIVE} at {label}"
    return [*found, Check(sentence, ahead >= -timing.TOLERANCE_DB)]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = make_parser("scripts.bench.matmul", __doc__, repeat=11, asserts="ours is not ahead")
    parser.add_argument(
        "--shapes", type=timing.shape_type, nargs="+", metavar="MxKxN", help="default: by device"
    )
    args = start(parser, argv)
    shapes = args.shapes or SHAPES[args.device]
    rows = [row for shape in shapes for recipe in RECIPES for row in measure(shape, recipe, args)]
    return finish(args, {"matmul": matmul_table(rows)}, checks(rows))


if __name__ == "__main__":
    sys.exit(main())
