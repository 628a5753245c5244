"""References for the three GEMMs of any config in fp64, from its fields and the formulas alone.

Only :func:`layer_of` and :func:`step` run the code under test.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from reference import FORMATS, nearest, reference_blocks

from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = [recipe.value for recipe in Float8LinearRecipeName]
GEMMS = ("output", "grad_input", "grad_weight")
OPERANDS = ("input", "weight", "grad_output")

# For each GEMM: its operands in order, and the dim of each (as stored) that is contracted.
SUMMED = {
    "output": (("input", 1), ("weight", 1)),
    "grad_input": (("grad_output", 1), ("weight", 0)),
    "grad_weight": (("grad_output", 0), ("input", 0)),
}


def magnitude(x: torch.Tensor, covered: int | None) -> torch.Tensor:
    """The amax in fp64: 0-dim, or of size 1 along the covered dim."""
    return x.double().abs().amax() if covered is None else x.double().abs().amax(covered, True)


def rounded(
    x: torch.Tensor, dtype: torch.dtype, amax: torch.Tensor, power_of_2: bool
) -> torch.Tensor:
    """Cast ``x`` with the scale of ``amax``, and dequantize it; fp64."""
    m = (FORMATS[dtype][0] / amax.double().clamp(min=1e-12)).float()
    if power_of_2:
        m = torch.ldexp(torch.ones_like(m), torch.frexp(m).exponent - 1)
    return multiplied(x, dtype, torch.where(amax.isfinite(), m, torch.nan))


def multiplied(x: torch.Tensor, dtype: torch.dtype, m: torch.Tensor) -> torch.Tensor:
    """Cast ``x`` with fp32 multipliers, and dequantize it; fp64."""
    return nearest((x.float() * m).double(), dtype) * (1 / m).double()


def cast_by_blocks(
    x: torch.Tensor, dtype: torch.dtype, rows: int, columns: int, rule: str | None
) -> torch.Tensor:
    """Cast a matrix with one scale per block, and dequantize it; fp64."""
    exponents, values = reference_blocks(x, dtype, (rows, columns, 0, 0), rule)
    i, j = torch.arange(x.shape[0]) // rows, torch.arange(x.shape[1]) // columns
    return values * torch.exp2(exponents[i][:, j].double() - 127) if x.numel() else values


def summed_in_blocks(
    x: torch.Tensor, dtype: torch.dtype, summed: int, block: tuple[int, int], rule: str | None
) -> torch.Tensor:
    """The dequantized operand with block scales, fp64, of a GEMM that contracts the dim ``summed``.

    For the GEMM that contracts tokens, the float8 values of the other GEMM are cast again in blocks
    along the tokens, with scales for which nothing saturates.
    """
    rows, columns = block
    first = cast_by_blocks(x, dtype, rows, columns, rule)
    if rows == 1 and summed == 0:
        return cast_by_blocks(first, dtype, columns, 1, rule and "ceil")
    return first


def in_order(
    gemm: str, left: torch.Tensor, right: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands of a GEMM as the factors of a matrix product."""
    transposed = {"output": (left, right.t()), "grad_weight": (left.t(), right)}
    return transposed.get(gemm, (left, right))


def row_scales(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Power-of-two scales of rows, fp64, ``[rows, 1]``."""
    m = (FORMATS[dtype][0] / magnitude(x, 1).clamp(min=1e-12)).float()
    scale = torch.ldexp(torch.ones_like(m), 1 - torch.frexp(m).exponent).double()
    return torch.where(magnitude(x, 1).isfinite(), scale, torch.nan)


def products(
    config: Float8LinearConfig, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Output and gradients in fp64, for input ``[M, K]``, weight ``[N, K]`` and grad_output.

    Casts are derived from the fields of the config, not from the name of a recipe.
    """
    tensors = {"input": x, "weight": w, "grad_output": g}
    pairs = {gemm: multiplied_by(gemm, config, tensors) for gemm in GEMMS}
    return {gemm: left @ right for gemm, (left, right) in pairs.items()}


def multiplied_by(
    gemm: str, config: Float8LinearConfig, operands: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The dequantized factors of a GEMM, fp64."""
    casts = {name: cast_of(config, name, gemm) for name in OPERANDS}
    used = [name for name, _ in SUMMED[gemm]]
    enabled = casts[used[0]].scaling_type is not ScalingType.DISABLED
    if enabled and config.fold_row_scales and all(x.numel() for x in operands.values()):
        dtypes = {name: dtype_of(cast, name) for name, cast in casts.items()}
        return folded(*(operands[name] for name in OPERANDS), dtypes)[gemm]
    sides = (
        dequantized(operands[name], casts[name], name, summed, config.round_scales_to_power_of_2)
        for name, summed in SUMMED[gemm]
    )
    return in_order(gemm, *sides)


def cast_of(config: Float8LinearConfig, operand: str, gemm: str) -> CastConfig:
    """The cast of an operand for a GEMM. If none is set, the operand's first cast."""
    second = getattr(config, f"cast_config_{operand}_for_{gemm}", None)
    return second or getattr(config, f"cast_config_{operand}")  # type: ignore[no-any-return]


def dtype_of(cast: CastConfig, operand: str) -> torch.dtype:
    """The dtype of a cast. If none is set, e5m2 for gradients, and e4m3 otherwise."""
    return cast.target_dtype or (E5M2 if operand == "grad_output" else E4M3)


def dequantized(
    x: torch.Tensor, cast: CastConfig, operand: str, summed: int, power_of_2: bool
) -> torch.Tensor:
    """The dequantized operand of a GEMM that contracts the dim ``summed``, fp64."""
    if cast.scaling_type is ScalingType.DISABLED or not x.numel():
        return x.double()
    dtype = dtype_of(cast, operand)
    if cast.block_size is not None:
        return summed_in_blocks(x, dtype, summed, cast.block_size, cast.scale_rule)
    by_row = cast.scaling_granularity is ScalingGranularity.AXISWISE
    return rounded(x, dtype, magnitude(x, summed if by_row else None), power_of_2)


def folded(
    x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, dtypes: dict[str, torch.dtype]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The factors of each GEMM by the formulas in fp8_dist/linear/rowwise_folded.py, fp64."""
    t, s = row_scales(x, dtypes["input"]), row_scales(w, dtypes["weight"])
    xd = rounded(x, dtypes["input"], magnitude(x, 1), True)
    wd = rounded(w, dtypes["weight"], magnitude(w, 1), True)
    xq, wq = xd / t, wd / s
    g0 = rounded(g, dtypes["grad_output"], magnitude(g, 1), True)
    by_s, by_t = in_fp32(g0 * s.t()), in_fp32(g0 * t)
    g1 = rounded(by_s, dtypes["grad_output"], magnitude(in_fp32(g.double() * s.t()), 1), True)
    g2 = rounded(by_t, dtypes["grad_output"], magnitude(by_t, 0), True)
    return {"output": (xd, wd.t()), "grad_input": (g1, wq), "grad_weight": (g2.t(), xq)}


def in_fp32(x: torch.Tensor) -> torch.Tensor:
    """fp64 values, replaced by inf if fp32 would overflow."""
    return torch.where(x.abs() > torch.finfo(torch.float32).max, torch.inf, x)


def exact(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
    """The three products of high-precision operands, fp64."""
    x, w, g = x.double(), w.double(), g.double()
    return {"output": x @ w.t(), "grad_input": g @ w, "grad_weight": g.t() @ x}


def operands(
    m: int = 64, k: int = 48, n: int = 80, outliers: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random fp32 operands; with ``outliers``, rows and channels differ in magnitude."""
    x, w, g = torch.randn(m, k), torch.randn(n, k) / k**0.5, torch.randn(m, n)
    if outliers:
        x *= torch.randn(m, 1).exp()
        x[:, k // 3] *= 30
        w *= torch.randn(n, 1).exp()
        g *= torch.randn(m, 1).exp() * 1e-3
        g[:, n // 3] *= 30
    return x, w, g


def config_of(recipe: str, **changes: Any) -> Float8LinearConfig:
    """The recipe's config with some fields changed."""
    return replace(Float8LinearConfig.from_recipe_name(recipe), **changes)


def floor_of_mxfp8() -> Float8LinearConfig:
    """The recipe mxfp8 with the scale rule "floor"."""
    config = config_of("mxfp8")
    fields = [f"cast_config_{operand}" for operand in OPERANDS]
    return replace(config, **{f: replace(getattr(config, f), scale_rule="floor") for f in fields})


def layer_of(
    config: Float8LinearConfig, w: torch.Tensor, bias: torch.Tensor | None = None
) -> Float8Linear:
    """A float8 layer with the given weight and bias."""
    layer = Float8Linear(w.shape[1], w.shape[0], bias is not None, dtype=w.dtype, config=config)
    layer.weight = nn.Parameter(w.clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone())
    return layer


def step(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run a forward and backward; return the output and the gradients."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    output.backward(g)
    named = {f"grad_{name}": parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": output.detach(), "grad_input": x.grad, **named}
