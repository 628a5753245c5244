"""Ways to get two gradients from one float8 copy of input and weight, in plain torch and fp64.

The letters are those of ``fp8_dist/folding.py``, whose choice ("ours") is compared here with others
without calling the library: x = input, w = weight, g = grad_output; xq and wq are the only float8
copies of x and w, with a scale for each row, t and s. The gradients are the products of g1 and wq,
and of g2 and xq. The ways differ in what g1 and g2 are cast from::

    direct     g1 = cast_rows(g * s)     g2 = cast_columns(g * t)
    ours       g1 = cast_rows(g0 * s)    g2 = cast_columns(g0 * t)       with g0 = cast_rows(g)
    chained    g1 = cast_rows(g * s)     g2 = cast_columns(g1 / s * t)   with g1 dequantized

In "rowwise" nothing is folded: x and w are cast a second time, along their other dim.
"""

import torch
from torch import Tensor

from scripts.measure.operands import Operands

WAYS = ("rowwise", "direct", "ours", "chained")
FIGURES = (
    "grad_input",
    "grad_weight",
    "worst rows of grad_weight",
    "worst columns of grad_weight",
)


def cast(tensor: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """e4m3 values and their dequantization scales, powers of two; both fp64.

    Args:
        tensor: fp64, a matrix.
        dim: what a scale covers: 1 is a row, 0 a column.
    """
    amax = tensor.abs().amax(dim, keepdim=True).clamp(min=1e-30)
    multiplier = torch.exp2(torch.floor(torch.log2((448 / amax).float()))).double()
    scaled = (tensor * multiplier).clamp(-448, 448).float()
    return scaled.to(torch.float8_e4m3fn).double(), 1 / multiplier


def products(operands: Operands) -> dict[str, dict[str, Tensor]]:
    """grad_input [M, K] and grad_weight [N, K], fp64, by each of the `WAYS`."""
    x, w, g = (tensor.double() for tensor in operands)
    (xq, t), (wq, s) = cast(x, 1), cast(w, 1)
    s = s.t()

    def dequantized(tensor: Tensor, dim: int) -> Tensor:
        data, scale = cast(tensor, dim)
        return data * scale

    rows, columns = (dequantized(g, dim) for dim in (1, 0))
    by_way = {"rowwise": (rows @ dequantized(w, 0), columns.t() @ dequantized(x, 0))}
    g1 = dequantized(g * s, 1)
    for way, first, second in (
        ("direct", g1, g * t),
        ("ours", dequantized(rows * s, 1), rows * t),
        ("chained", g1, g1 / s * t),
    ):
        by_way[way] = first @ wq, dequantized(second, 0).t() @ xq
    return {
        way: dict(zip(("grad_input", "grad_weight"), both, strict=True))
        for way, both in by_way.items()
    }
