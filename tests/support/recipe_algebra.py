"""The three GEMMs of every recipe in fp64, written down from its formulas alone.

Nothing here calls the code under test, but for :func:`layer_of` and :func:`step`, which run it.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from reference import FORMATS

from fp8_dist import Float8Linear, Float8LinearConfig, Float8LinearRecipeName

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = [recipe.value for recipe in Float8LinearRecipeName]
GEMMS = ("output", "grad_input", "grad_weight")
OPERANDS = ("input", "weight", "grad_output")

# Of a GEMM's two operands, in its order: the dim that one scale covers; "tensor"; "high" precision.
Covered = int | str
CASTS: dict[str, dict[str, tuple[Covered, Covered]]] = {
    "tensorwise": dict.fromkeys(GEMMS, ("tensor", "tensor")),
    "delayed": dict.fromkeys(GEMMS, ("tensor", "tensor")),
    "rowwise": {"output": (1, 1), "grad_input": (1, 0), "grad_weight": (0, 0)},
    "rowwise_with_gw_hp": {
        "output": (1, 1),
        "grad_input": (1, "tensor"),
        "grad_weight": ("high", "high"),
    },
}
# The size of the blocks, and the rule of their scales.
BLOCKS: dict[str, tuple[int, str | None]] = {"blockwise": (128, None), "mxfp8": (32, "ceil")}


def magnitude(x: torch.Tensor, covered: Covered) -> torch.Tensor:
    """amax in fp64: 0-dim, or of size 1 along the covered dim."""
    return x.double().abs().amax() if covered == "tensor" else x.double().abs().amax(covered, True)


def rounded(
    x: torch.Tensor, dtype: torch.dtype, amax: torch.Tensor, power_of_2: bool
) -> torch.Tensor:
    """What ``x`` dequantizes to, fp64, if it is cast with the scale of ``amax``."""
    m = (FORMATS[dtype][0] / amax.double().clamp(min=1e-12)).float()
    if power_of_2:
        m = torch.ldexp(torch.ones_like(m), torch.frexp(m).exponent - 1)
    return multiplied(x, dtype, torch.where(amax.isfinite(), m, torch.nan))


def multiplied(x: torch.Tensor, dtype: torch.dtype, m: torch.Tensor) -> torch.Tensor:
    """What ``x`` dequantizes to, fp64, if it is cast with these multipliers, fp32."""
    largest, bits, smallest = FORMATS[dtype]
    scaled = (x.float() * m).double().clamp(-largest, largest)
    exponent = (torch.frexp(scaled).exponent - 1).clamp(min=smallest)
    step = torch.ldexp(torch.ones_like(scaled), exponent - bits)
    return torch.round(scaled / step) * step * (1 / m).double()


def of_blocks(
    x: torch.Tensor, dtype: torch.dtype, rows: int, columns: int, rule: str | None
) -> torch.Tensor:
    """What a matrix dequantizes to, fp64, if it is cast with a scale per block."""
    amax = torch.empty(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = slice(i, i + rows), slice(j, j + columns)
            amax[block] = magnitude(x[block], "tensor")
    if rule is None:
        return rounded(x, dtype, amax, power_of_2=True)
    # From 2 ** -127 on, which is that of zeros.
    if rule == "floor":  # floor(log2(amax)) - floor(log2(448))
        exponent = torch.frexp(amax).exponent
        exponent -= torch.frexp(torch.tensor(FORMATS[dtype][0])).exponent
    else:  # ceil(log2(amax / 448))
        fraction, exponent = torch.frexp(amax / FORMATS[dtype][0])
        exponent = torch.where(fraction == 0.5, exponent - 1, exponent)
    exponent = exponent.masked_fill(amax == 0, -127).clamp(min=-127)
    m = torch.ldexp(torch.ones(x.shape), -exponent)
    x = x.masked_fill(exponent == -127, 0)
    return multiplied(x, dtype, torch.where(amax.isfinite(), m, torch.nan))


def row_scales(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Powers of two, fp64, ``[rows, 1]``."""
    m = (FORMATS[dtype][0] / magnitude(x, 1).clamp(min=1e-12)).float()
    scale = torch.ldexp(torch.ones_like(m), 1 - torch.frexp(m).exponent).double()
    return torch.where(magnitude(x, 1).isfinite(), scale, torch.nan)


def products(
    recipe: str,
    x: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor,
    *,
    power_of_2: bool | None = None,
    dtypes: dict[str, torch.dtype] | None = None,
) -> dict[str, torch.Tensor]:
    """Output and gradients of ``recipe``, fp64.

    Args:
        recipe: its name.
        x, w, g: input ``[M, K]``, weight ``[N, K]``, grad_output ``[M, N]``.
        power_of_2: instead of the recipe's own choice. (Scales of blocks have no other.)
        dtypes: of operands that aren't cast to the recipe's own dtype.
    """
    by_row = recipe.startswith("rowwise")
    power_of_2 = by_row if power_of_2 is None else power_of_2
    grad_dtype = E4M3 if by_row or recipe in BLOCKS else E5M2
    dtypes = {"input": E4M3, "weight": E4M3, "grad_output": grad_dtype} | (dtypes or {})
    if recipe in BLOCKS:
        return blocked(x, w, g, dtypes, *BLOCKS[recipe])
    if recipe == "rowwise_folded":
        pairs = folded(x, w, g, dtypes)
        return {gemm: left @ right for gemm, (left, right) in pairs.items()}

    def cast(operand: str, tensor: torch.Tensor, covered: Covered) -> torch.Tensor:
        if covered == "high":
            return tensor.double()
        return rounded(tensor, dtypes[operand], magnitude(tensor, covered), power_of_2)

    casts = CASTS[recipe]
    return {
        "output": cast("input", x, casts["output"][0]) @ cast("weight", w, casts["output"][1]).t(),
        "grad_input": cast("grad_output", g, casts["grad_input"][0])
        @ cast("weight", w, casts["grad_input"][1]),
        "grad_weight": cast("grad_output", g, casts["grad_weight"][0]).t()
        @ cast("input", x, casts["grad_weight"][1]),
    }


def blocked(
    x: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor,
    dtypes: dict[str, torch.dtype],
    size: int,
    rule: str | None,
) -> dict[str, torch.Tensor]:
    """The GEMMs of the recipes with scales of blocks, which are powers of two in any case.

    The GEMM that contracts the tokens takes the float8 values of the others, cast again in blocks
    along the tokens, with scales by which nothing saturates.
    """
    xd = of_blocks(x, dtypes["input"], 1, size, rule)
    wd = of_blocks(w, dtypes["weight"], size, size, rule)
    gd = of_blocks(g, dtypes["grad_output"], 1, size, rule)
    by_tokens = [
        of_blocks(t, dtypes[name], size, 1, rule)
        for name, t in (("grad_output", gd), ("input", xd))
    ]
    return {
        "output": xd @ wd.t(),
        "grad_input": gd @ wd,
        "grad_weight": by_tokens[0].t() @ by_tokens[1],
    }


def folded(
    x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, dtypes: dict[str, torch.dtype]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What each GEMM multiplies by the algebra in fp8_dist/linear/rowwise_folded.py, fp64."""
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
    """Infinite where fp32 overflows; fp64."""
    return torch.where(x.abs() > torch.finfo(torch.float32).max, torch.inf, x)


def exact(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
    """The three products of high-precision operands, fp64."""
    x, w, g = x.double(), w.double(), g.double()
    return {"output": x @ w.t(), "grad_input": g @ w, "grad_weight": g.t() @ x}


def operands(
    m: int = 64, k: int = 48, n: int = 80, outliers: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, weight and grad_output, fp32; with outliers rows, channels of many magnitudes."""
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
    """The recipe mxfp8, but for the rule of its scales."""
    config = config_of("mxfp8")
    fields = [f"cast_config_{operand}" for operand in OPERANDS]
    return replace(config, **{f: replace(getattr(config, f), scale_rule="floor") for f in fields})


def layer_of(
    config: Float8LinearConfig, w: torch.Tensor, bias: torch.Tensor | None = None
) -> Float8Linear:
    """A layer with this weight."""
    layer = Float8Linear(w.shape[1], w.shape[0], bias is not None, dtype=w.dtype, config=config)
    layer.weight = nn.Parameter(w.clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone())
    return layer


def step(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients of a forward and a backward."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    output.backward(g)
    named = {f"grad_{name}": parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": output.detach(), "grad_input": x.grad, **named}
