"""Times the scaled GEMM beside torch._scaled_mm, a bf16 GEMM and torchao's, in one run.

    python scripts/bench_matmul.py --assert --write

The three GEMMs of a layer with in_features K and out_features N on M rows, with operands in the
layouts that a step has: x @ w.t(), g @ w and g.t() @ x, cast already. All candidates multiply the
same float8 bytes with the same scales. `--assert` fails where ours is slower than torch._scaled_mm
or torchao's, or further from the exact product than torch._scaled_mm.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import torch
from bench_peers import TORCHAO, torchao_cast
from benchmarks import (
    PAGE,
    TOLERANCE_DB,
    Check,
    Report,
    Timed,
    make_parser,
    markdown,
    medians,
    milliseconds,
    ratio,
    section,
    shape_text,
    shape_type,
    sqnr,
    start,
)

from fp8_dist import CastConfig, Float8LinearConfig, Float8Tensor, cast_to_float8
from fp8_dist.config import GEMM_OPERANDS, Gemm, Operand
from fp8_dist.tensor import scaled_mm

Shape = tuple[int, int, int]  # M, K, N
RECIPES = ("tensorwise", "rowwise")
LAYOUTS: dict[Gemm, str] = {
    "output": "x @ w.t()",
    "grad_input": "g @ w",
    "grad_weight": "g.t() @ x",
}
OURS, NATIVE, BF16, PEER = "fp8_dist", "torch._scaled_mm", "bf16", "torchao"
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
TITLE = "A matrix product"
ABOUT = """\
One GEMM on operands that have been cast, bf16 result; medians of {repeat} turns. dB: how close a
result is to the fp64 product of the same operands."""


@dataclasses.dataclass
class Row:
    """One GEMM: median seconds and decibels by candidate."""

    shape: Shape
    recipe: str
    gemm: Gemm
    seconds: dict[str, float]
    decibels: dict[str, float]

    @property
    def label(self) -> str:
        """Names it among others."""
        return f"{shape_text(self.shape)} {self.recipe} {LAYOUTS[self.gemm]}"


def operands_of(shape: Shape, gemm: Gemm, device: torch.device) -> dict[Operand, torch.Tensor]:
    """The two high-precision matrices of a GEMM as a layer stores them, left one first."""
    m, k, n = shape
    sizes = {"input": (m, k), "weight": (n, k), "grad_output": (m, n)}
    generator = torch.Generator().manual_seed(0)
    return {
        operand: torch.randn(sizes[operand], generator=generator).to(device, torch.bfloat16)
        for operand in GEMM_OPERANDS[gemm]
    }


def in_layout(gemm: Gemm, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The stored matrices as the GEMM takes them."""
    if gemm == "grad_weight":
        return left.t(), right
    return left, right.t() if gemm == "output" else right


def our_cast(recipe: str, x: torch.Tensor, operand: Operand, gemm: Gemm) -> Float8Tensor:
    """An operand as a layer of a recipe casts it for one of its GEMMs."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    cast = config.cast(operand, gemm)
    assert cast is not None
    granularity = config.cast_config(operand, gemm).scaling_granularity
    dim = {"tensor": None, "row": -1, "column": 0}[cast.granularity.name]
    result = cast_to_float8(
        x,
        CastConfig(scaling_granularity=granularity, target_dtype=cast.dtype),
        dim=dim,
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )
    assert isinstance(result, Float8Tensor)
    return result


def native_of(a: Float8Tensor, b: Float8Tensor) -> Timed:
    """torch._scaled_mm on contiguous copies made beforehand: row-major by column-major."""
    left, right = a.qdata.contiguous(), b.qdata.t().contiguous().t()
    # (A scale's dim of size 1 may have any stride, which this operator minds.)
    scales = [s.clone(memory_format=torch.contiguous_format) for s in (a.scale, b.scale)]
    return Timed(lambda: torch._scaled_mm(left, right, *scales, out_dtype=torch.bfloat16))


def measure(shape: Shape, recipe: str, gemm: Gemm, args: argparse.Namespace) -> Row:
    """All candidates at one shape."""
    stored = operands_of(shape, gemm, args.device)
    high = in_layout(gemm, *stored.values())
    a, b = in_layout(gemm, *(our_cast(recipe, x, name, gemm) for name, x in stored.items()))
    assert isinstance(a, Float8Tensor)
    assert isinstance(b, Float8Tensor)
    timed = {
        OURS: Timed(lambda: scaled_mm(a, b, out_dtype=torch.bfloat16)),
        NATIVE: native_of(a, b),
        BF16: Timed(lambda: torch.mm(*high)),
    }
    if f"{PEER} {recipe}" in TORCHAO:
        casts = (torchao_cast(f"{PEER} {recipe}", x, name, gemm) for name, x in stored.items())
        theirs = in_layout(gemm, *casts)
        timed[PEER] = Timed(lambda: torch.mm(*theirs))
    exact = (a.qdata.double() * a.scale) @ (b.qdata.double() * b.scale)
    decibels = {name: sqnr(exact, timed[name].run()) for name in timed if name != BF16}
    label = f"{shape_text(shape)} {recipe} {gemm}"
    seconds = medians(timed, args, description=label)
    return Row(shape, recipe, gemm, seconds, decibels)


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line per GEMM."""
    head = ["M x K x N", "scales", "GEMM", "ms", "bf16, ms", "x bf16"]
    head += [f"faster than {NATIVE}", f"faster than {PEER}", "dB"]
    lines = [[*head, f"{NATIVE}, dB", f"{PEER}, dB"]]
    for row in rows:
        ours = row.seconds[OURS]
        lines.append(
            [
                shape_text(row.shape),
                row.recipe,
                LAYOUTS[row.gemm],
                milliseconds(ours),
                milliseconds(row.seconds[BF16]),
                ratio(ours, row.seconds[BF16]),
                ratio(row.seconds[NATIVE], ours),
                ratio(row.seconds.get(PEER), ours),
                *(decibel(row.decibels.get(name)) for name in (OURS, NATIVE, PEER)),
            ]
        )
    return markdown(lines)


def decibel(value: float | None) -> str:
    """A cell; empty where there is no value."""
    return "" if value is None else f"{value:.2f}"


def checks(rows: Sequence[Row]) -> list[Check]:
    """What `--assert` asks of all rows, each said of the one that comes last."""
    found = []
    for name in (NATIVE, PEER):
        if any(name not in row.seconds for row in rows):
            found.append(Check(f"{name} is installed", False))
            continue
        faster, row = min(
            ((row.seconds[name] / row.seconds[OURS], row) for row in rows), key=lambda pair: pair[0]
        )
        sentence = f"at least as fast as {name}; least ahead, {faster:.2f}x, at {row.label}"
        found.append(Check(sentence, faster >= 1))
    ahead, row = min(
        ((row.decibels[OURS] - row.decibels[NATIVE], row) for row in rows), key=lambda pair: pair[0]
    )
    sentence = f"as close to the exact product as {NATIVE}; furthest, {ahead:+.2f} dB, at"
    return [*found, Check(f"{sentence} {row.label}", ahead >= -TOLERANCE_DB)]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = make_parser(__doc__, repeat=11)
    add = parser.add_argument
    add("--shapes", type=shape_type, nargs="+", metavar="MxKxN", help="default: by device")
    add("--assert", dest="asserted", action="store_true", help="fail where ours is not ahead")
    args = start(parser, argv)
    shapes = args.shapes or SHAPES[args.device.type]
    rows = [
        measure(shape, recipe, gemm, args)
        for shape in shapes
        for recipe in RECIPES
        for gemm in LAYOUTS
    ]
    report = Report(PAGE, {TITLE: section(args, ABOUT.format(repeat=args.repeat), table(rows))})
    report.data = [dataclasses.asdict(row) for row in rows]
    report.checks = checks(rows)
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(main())
