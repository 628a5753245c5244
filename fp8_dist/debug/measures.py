"""Measures of casts and GEMMs: maxima and sums, from which statistics are computed."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fp8_dist.kernels.cpu import upcast
from fp8_dist.kernels.scale import magnitudes
from fp8_dist.recipe import Gemm
from fp8_dist.scaling import Quantized

# The number of elements that are read at a time, on CPU and on other devices. On CPU, a part fits
# into the cache. On a GPU, the fp32 copy of a part takes little memory.
_CPU_PART, _PART = 2**18, 2**24


class Measures(NamedTuple):
    """Measures of one or several casts, one fp64 number each.

    The first five fields are combined by their maximum, the others by their sum.
    """

    amax: float  # the amax of the operand
    scale: float  # the largest scale
    minus_scale: float  # the smallest scale, negated
    minus_rank: float  # the lowest rank with a non-finite value, negated; -inf if there is none
    minus_position: float  # the first position among a step's casts, negated; -inf if unknown
    values: float  # the number of values that are not zero in high precision
    underflow: float  # the number of those values that are zero in float8
    saturated: float  # the number of values that saturate
    nonfinite: float  # the number of values that are NaN or infinite
    signal: float  # the sum of squares of the operand
    noise: float  # the sum of squares of the errors of the cast


MAXIMA = 5  # the number of fields that are combined by their maximum


def nothing(device: torch.device | str) -> torch.Tensor:
    """Return the measures of no casts, the identity of :func:`combine_`."""
    total = torch.zeros(len(Measures._fields), dtype=torch.float64, device=device)
    total[1:MAXIMA] = -math.inf
    return total


def _column(table: torch.Tensor, name: str) -> torch.Tensor:
    """Return a view of one measure in ``table [..., 11]``."""
    return table[..., Measures._fields.index(name)]


def set_(table: torch.Tensor, **measures: torch.Tensor | float) -> None:
    """Set some of the measures in ``table [..., 11]``, by the names of their fields."""
    for name, values in measures.items():
        _column(table, name)[...] = values


def combine_(total: torch.Tensor, more: torch.Tensor) -> None:
    """Combine a total in place with measures ``[..., 11]`` of more casts of the same operands."""
    total[..., :MAXIMA] = torch.maximum(total[..., :MAXIMA], more[..., :MAXIMA])  # propagates NaN
    total[..., MAXIMA:] += more[..., MAXIMA:]


def measure_casts(high: torch.Tensor, lows: Sequence[Quantized], rank: int) -> list[torch.Tensor]:
    """Return the :class:`Measures` of each cast of a local operand, fp64 ``[11]`` on its device.

    On a GPU there is no host synchronization. On a CPU, where it is cheap to read a value, parts
    without non-finite or saturated values take a faster path. A value saturates if its magnitude,
    in units of its scale, is too large to round to the largest float8 number.
    """
    totals = [nothing(high.device) for _ in lows]
    if not high.numel():
        return totals
    columns = high.shape[-1] if high.ndim else 1
    matrix = high.detach().reshape(-1, columns)
    qdatas = [low.qdata.detach().reshape(matrix.shape) for low in lows]
    scales = [matrix_scales(low) for low in lows]
    rows = max(1, (_CPU_PART if high.is_cpu else _PART) // columns)
    for start in range(0, len(matrix), rows):
        part = matrix[start : start + rows]
        x = part.to(torch.promote_types(part.dtype, torch.float32))
        of_operand = _measure_operand(part)
        for total, low, qdata, scale in zip(totals, lows, qdatas, scales, strict=True):
            if scale.ndim and len(scale) == len(matrix):
                scale = scale[start : start + rows]
            measured = of_operand.clone()
            qdata_part = qdata[start : start + rows]
            _measure_cast_(measured, x, qdata_part, scale, low.scheme.saturates_above)
            combine_(total, measured)
    for total, scale in zip(totals, scales, strict=True):
        set_(
            total,
            scale=scale.max(),
            minus_scale=-scale.min(),
            minus_rank=torch.where(_column(total, "nonfinite") > 0, -float(rank), -math.inf),
        )
    return totals


def _measure_operand(part: torch.Tensor) -> torch.Tensor:
    """Return the measures of a part of an operand that do not depend on its casts."""
    total = nothing(part.device)
    bits = magnitudes(part)
    amax = bits.max().view(part.dtype)
    set_(total, amax=amax, values=torch.count_nonzero(bits))
    if not (part.is_cpu and amax.isfinite()):
        # inf - inf and NaN - NaN are NaN
        set_(total, nonfinite=torch.count_nonzero(part - part))
    return total


def matrix_scales(low: Quantized) -> torch.Tensor:
    """Return the scales of a cast as a matrix: 0-dim, or ``[1 or M, 1 or K]`` for ``[M, K]``."""
    scales = tuple([scale.detach() for scale in low.scales])
    wide = low.scheme.element_scales(scales, low.qdata.shape, low.start)
    if wide.ndim in (0, 2):
        return wide
    *leading, columns = wide.shape
    rows = leading if set(leading) <= {1} else low.qdata.shape[:-1]
    return wide.expand(*rows, columns).reshape(-1, columns)


def _measure_cast_(
    total: torch.Tensor,
    x: torch.Tensor,
    qdata: torch.Tensor,
    scale: torch.Tensor,
    limit: float,
) -> None:
    """Add the measures of the cast of a part ``x`` to those of the part itself.

    Squares are summed in units of the scale, so that they neither overflow nor vanish in fp32.
    """
    units = x * scale.reciprocal()
    largest = max(abs(end.item()) for end in units.aminmax()) if units.is_cpu else math.inf
    if not largest <= limit:
        set_(total, saturated=torch.count_nonzero(units.abs() > limit))
    low = upcast(qdata, x.dtype, largest < math.inf) if qdata.is_cpu else qdata.to(x.dtype)
    # The dims along which one scale covers all indices. Along the others it covers one index.
    dims = [d for d in range(2) if not (scale.ndim and scale.shape[d] == x.shape[d])]
    unit = scale.to(torch.float64).square()

    def sum_squares(values: torch.Tensor) -> torch.Tensor:
        squares = values.square()
        if dims:
            squares = squares.sum(dims, keepdim=True)
        return (squares.double() * unit).sum()

    underflow = _column(total, "values") - torch.count_nonzero(magnitudes(qdata))
    set_(total, underflow=underflow, signal=sum_squares(units), noise=sum_squares(low - units))


def measure_gemm(
    gemm: Gemm, left: torch.Tensor, right: torch.Tensor, result: torch.Tensor
) -> torch.Tensor | None:
    """Return ``signal`` and ``noise`` of a float8 GEMM's result, as :class:`Measures`, or None.

    The reference is the product of the operands in fp32. The result is None if there are no tokens,
    or if shapes don't match because ``left`` is not the input of the layer.

    Args:
        left: the input or grad_output ``[..., K]``, in high precision.
        right: the weight, or the input for grad_weight, in high precision.
        result: the result of the float8 GEMM.
    """
    a, b, product = (x.reshape(-1, x.shape[-1]).to(torch.float32) for x in (left, right, result))
    if gemm == "grad_weight":
        a = a.t()
    if gemm == "output":
        b = b.t()
    if not a.numel() or a.shape[1] != b.shape[0] or product.shape != (len(a), b.shape[1]):
        return None
    exact = torch.mm(a, b)
    total = nothing(exact.device)
    signal = exact.to(torch.float64).square().sum()
    noise = (product - exact).to(torch.float64).square().sum()
    set_(total, scale=0.0, minus_scale=0.0, signal=signal, noise=noise)
    return total
