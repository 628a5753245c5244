"""Times the scaled GEMM beside torch._scaled_mm, a bf16 GEMM and torchao's, in one run.

    python -m scripts.bench.matmul --assert --write

The three GEMMs of a layer with in_features K and out_features N on M rows, with operands in the
layouts that a step has: x @ w.t(), g @ w and g.t() @ x, cast already. All candidates multiply the
same float8 bytes with the same scales. `--assert` fails where ours is slower than torch._scaled_mm
or torchao's, or further from the exact product than torch._scaled_mm.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fp8_dist import CastConfig, Float8LinearConfig, Float8Tensor, cast_to_float8
from fp8_dist.casts import GEMM_OPERANDS, Gemm, Operand
from scripts.bench.timing import (
    TOLERANCE_DB,
    Timed,
    make_parser,
    medians,
    milliseconds,
    ratio,
    shape_text,
    shape_type,
    start,
)
from scripts.common.candidates import TORCHAO, config_of, linear_of
from scripts.common.markdown import table
from scripts.common.metrics import sqnr
from scripts.common.report import Check, finish

try:
    from torchao.float8.float8_scaling_utils import (
        get_maybe_axiswise_dim,
        hp_tensor_to_float8_dynamic,
    )
    from torchao.float8.float8_training_tensor import GemmInputRole
except ImportError:
    assert not TORCHAO

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


def operands_of(shape: Shape, gemm: Gemm, device: str) -> dict[Operand, torch.Tensor]:
    """The two high-precision matrices of a GEMM as a layer stores them, left one first."""
    m, k, n = shape
    sizes = {"input": (m, k), "weight": (n, k), "grad_output": (m, n)}
    generator = torch.Generator().manual_seed(0)
    return {
        operand: torch.randn(sizes[operand], generator=generator).to(device, torch.bfloat16)
        for operand in GEMM_OPERANDS[gemm]
    }


def in_layout(gemm: Gemm, left: Any, right: Any) -> tuple[Any, Any]:
    """The stored matrices as the GEMM takes them."""
    if gemm == "grad_weight":
        return left.t(), right
    return left, right.t() if gemm == "output" else right


def dim_of(operand: Operand, gemm: Gemm) -> int:
    """The dim of a stored matrix that a GEMM sums over, which is what a scale of rowwise covers."""
    return 0 if gemm == "grad_weight" or (operand, gemm) == ("weight", "grad_input") else -1


def our_cast(recipe: str, x: torch.Tensor, operand: Operand, gemm: Gemm) -> Float8Tensor:
    """An operand as a layer of a recipe casts it for one of its GEMMs."""
    config: Float8LinearConfig = config_of(recipe)
    cast = config.cast(operand, gemm)
    assert cast is not None
    granularity = config.cast_config(operand, gemm).scaling_granularity
    result = cast_to_float8(
        x,
        CastConfig(scaling_granularity=granularity, target_dtype=cast.dtype),
        dim=None if recipe == "tensorwise" else dim_of(operand, gemm),
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )
    assert isinstance(result, Float8Tensor)
    return result


def torchao_cast(recipe: str, x: torch.Tensor, operand: Operand, gemm: Gemm) -> torch.Tensor:
    """The same by torchao's layer."""
    name = f"{PEER} {recipe}"
    config = config_of(name)
    second = {"input": "grad_weight", "weight": "grad_input", "grad_output": "grad_weight"}
    suffix = f"_for_{gemm}" if gemm == second[operand] else ""
    cast = getattr(config, f"cast_config_{operand}{suffix}")
    return hp_tensor_to_float8_dynamic(
        x,
        cast.target_dtype,
        linear_of(name, nn.Linear(16, 16, device="meta")).linear_mm_config,
        gemm_input_role=GemmInputRole[operand.upper()],
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(dim_of(operand, gemm), cast.scaling_granularity),
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )


def native_of(a: Float8Tensor, b: Float8Tensor) -> Timed:
    """torch._scaled_mm on contiguous copies made beforehand: row-major by column-major."""
    left, right = a.qdata.contiguous(), b.qdata.t().contiguous().t()
    # A scale's dim of size 1 may have any stride, but this operator looks at it.
    scales = [s.clone(memory_format=torch.contiguous_format) for s in (a.scale, b.scale)]
    return Timed(lambda: torch._scaled_mm(left, right, *scales, out_dtype=torch.bfloat16))


def measure(shape: Shape, recipe: str, gemm: Gemm, args: argparse.Namespace) -> Row:
    """All candidates at one shape."""
    stored = operands_of(shape, gemm, args.device)
    high = in_layout(gemm, *stored.values())
    a, b = in_layout(gemm, *(our_cast(recipe, x, name, gemm) for name, x in stored.items()))
    timed = {
        OURS: Timed(lambda: torch.mm(a, b)),
        NATIVE: native_of(a, b),
        BF16: Timed(lambda: torch.mm(*high)),
    }
    if f"{PEER} {recipe}" in TORCHAO:
        theirs = in_layout(gemm, *(torchao_cast(recipe, x, o, gemm) for o, x in stored.items()))
        timed[PEER] = Timed(lambda: torch.mm(*theirs))
    exact = (a.qdata.double() * a.scale) @ (b.qdata.double() * b.scale)
    decibels = {name: sqnr(exact, timed[name].run()) for name in timed if name != BF16}
    seconds = medians(timed, args, description=f"{shape_text(shape)} {recipe} {gemm}")
    return Row(shape, recipe, gemm, seconds, decibels)


def matmul_table(rows: Sequence[Row]) -> str:
    """A line per GEMM."""
    header = ["M x K x N", "scales", "GEMM", "ms", "bf16, ms", "x bf16"]
    header += [f"faster than {NATIVE}", f"faster than {PEER}", "dB"]
    header += [f"{NATIVE}, dB", f"{PEER}, dB"]
    lines = [
        [
            shape_text(row.shape),
            row.recipe,
            LAYOUTS[row.gemm],
            milliseconds(row.seconds[OURS]),
            milliseconds(row.seconds[BF16]),
            ratio(row.seconds[OURS], row.seconds[BF16]),
            *(ratio(row.seconds.get(name), row.seconds[OURS]) for name in (NATIVE, PEER)),
            *(
                f"{row.decibels[name]:.2f}" if name in row.decibels else ""
                for name in (OURS, NATIVE, PEER)
            ),
        ]
        for row in rows
    ]
    return table(header, lines, "lllr")


def checks(rows: Sequence[Row]) -> list[Check]:
    """The conditions of `--assert`, each said of the row that is closest to breaking it."""
    found = []
    for name in (NATIVE, PEER):
        if any(name not in row.seconds for row in rows):
            found.append(Check(f"{name} is installed", False))
            continue
        faster = [row.seconds[name] / row.seconds[OURS] for row in rows]
        label = rows[faster.index(min(faster))].label
        sentence = f"at least as fast as {name}; least ahead, {min(faster):.2f}x, at {label}"
        found.append(Check(sentence, min(faster) >= 1))
    ahead = [row.decibels[OURS] - row.decibels[NATIVE] for row in rows]
    label = rows[ahead.index(min(ahead))].label
    sentence = f"as close to the exact product as {NATIVE}; furthest, {min(ahead):+.2f} dB, at"
    return [*found, Check(f"{sentence} {label}", min(ahead) >= -TOLERANCE_DB)]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = make_parser("scripts.bench.matmul", __doc__, repeat=11)
    add = parser.add_argument
    add("--shapes", type=shape_type, nargs="+", metavar="MxKxN", help="default: by device")
    add("--assert", dest="asserted", action="store_true", help="fail where ours is not ahead")
    args = start(parser, argv)
    rows = [
        measure(shape, recipe, gemm, args)
        for shape in args.shapes or SHAPES[args.device]
        for recipe in RECIPES
        for gemm in LAYOUTS
    ]
    data = [dataclasses.asdict(row) for row in rows]
    return finish(args, {"matmul": matmul_table(rows)}, data, checks(rows), args.asserted)


if __name__ == "__main__":
    sys.exit(main())
