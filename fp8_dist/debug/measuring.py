"""Counts and sums over a cast, from which its statistics follow; those of several casts combine."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fp8_dist.kernels.cpu.upcast import upcast
from fp8_dist.tensor import Quantized
from fp8_dist.tensor.ops import as_bytes

# On CPUs a cast is read in parts that fit into a cache.
_PART = 2**16  # elements


class Measures(NamedTuple):
    """What was measured of one cast, or of several; one fp64 number each.

    The maximum of several casts: ``amax`` (of the operand), ``scale`` (the largest one),
    ``minus_scale`` (the smallest one, negative), ``minus_rank`` (the first rank that met a value
    that is not finite, negative; -inf: none).
    The sum: ``values`` that are not zero in high precision, and those of them that ``underflow``
    (are zero in float8), that saturate (``saturated``), that are ``nonfinite``; the squares of the
    operand (``signal``) and of what the cast changes (``noise``).
    """

    amax: float
    scale: float
    minus_scale: float
    minus_rank: float
    values: float
    underflow: float
    saturated: float
    nonfinite: float
    signal: float
    noise: float


MAXIMA = 4  # so many fields, the first ones


def measure(high: torch.Tensor, low: Quantized, rank: int) -> torch.Tensor:
    """The :class:`Measures` of a cast: fp64 ``[10]``, on its device. No host synchronization.

    A value saturates if it lies beyond what rounding brings to the largest float8 number, in either
    direction. A dynamic scale lets none saturate.

    Args:
        high: ``[..., K]``, local, in high precision.
        low: its float8 copy.
        rank: of this process.
    """
    scale = low.granularity.gemm_scale(low.scale)
    rows, columns = math.prod(high.shape[:-1]), high.shape[-1] if high.ndim else 1
    high, qdata = high.reshape(rows, columns), low.qdata.reshape(rows, columns)
    total = nothing(high.device)
    if not high.numel():
        return total
    by_row = scale.ndim > 0 and scale.shape[0] == rows
    for part in _parts(high):
        combine_(total, _measure(high[part], qdata[part], scale[part] if by_row else scale))
    total[1], total[2] = scale.max(), -scale.min()
    total[3] = torch.where(total[7] > 0, -float(rank), -math.inf)
    return total


def measure_product(exact: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """The :class:`Measures` of a GEMM's result: ``signal`` and ``noise`` alone.

    Args:
        exact: of high-precision operands, fp32.
        found: of float8 ones, of the same shape.
    """
    total = nothing(exact.device)
    total[1] = total[2] = 0.0
    total[8] = exact.to(torch.float64).square().sum()
    total[9] = (found - exact).to(torch.float64).square().sum()
    return total


def nothing(device: torch.device | str) -> torch.Tensor:
    """The measures of no cast."""
    total = torch.zeros(len(Measures._fields), dtype=torch.float64, device=device)
    total[1:MAXIMA] = -math.inf
    return total


def combine_(total: torch.Tensor, more: torch.Tensor) -> None:
    """Add the measures ``[..., 10]`` of further casts of the same operands to a total, in place."""
    maxima = torch.maximum(total[..., :MAXIMA], more[..., :MAXIMA])  # of a NaN: NaN
    total[..., MAXIMA:] += more[..., MAXIMA:]
    total[..., :MAXIMA] = maxima


def _parts(x: torch.Tensor) -> Iterator[slice]:
    rows = max(1, _PART // x.shape[1]) if x.is_cpu else len(x)
    return (slice(first, first + rows) for first in range(0, len(x), rows))


def _measure(high: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # In units of the scale, where squares neither overflow nor vanish in fp32.
    dtype = torch.promote_types(high.dtype, torch.float32)
    smallest, largest = torch.aminmax(high)
    amax = torch.maximum(-smallest, largest).to(dtype)  # NaN if there is one
    x = high.to(dtype, copy=True)
    values = torch.count_nonzero(x)
    x.mul_(scale.reciprocal())
    low = upcast(qdata, dtype) if qdata.is_cpu else qdata.to(dtype)
    underflow = values - torch.count_nonzero(as_bytes(qdata) & 0x7F)
    saturated = nonfinite = torch.zeros((), device=x.device)
    # (On other devices the host would have to wait for the answer.)
    limit = _limit(qdata.dtype)
    if not (x.is_cpu and _are_within(x, amax, scale, limit)):
        saturated = torch.count_nonzero(x.abs() > limit)
        nonfinite = torch.count_nonzero(torch.sub(high, high))  # NaN of NaN and Inf
    signal, noise = _squares(x, scale), _squares(low.sub_(x), scale)
    none = torch.zeros((), device=x.device)
    numbers = (amax, none, none, none, values, underflow, saturated, nonfinite, signal, noise)
    return torch.stack([number.to(torch.float64) for number in numbers])


def _are_within(x: torch.Tensor, amax: torch.Tensor, scale: torch.Tensor, limit: float) -> bool:
    """Whether all values, in units of the scale, are at most ``limit``."""
    if amax < scale.min() * limit:
        return True
    smallest, largest = torch.aminmax(x)
    return bool(-limit <= smallest) and bool(largest <= limit)


def _squares(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The sum of squares of ``x * scale``: fp64, 0-dim."""
    if scale.ndim == 0:
        sums = torch.dot(x.reshape(-1), x.reshape(-1))
    elif scale.shape == x.shape:
        sums = x.square()
    else:
        sums = torch.linalg.vecdot(x, x, dim=scale.shape.index(1))
    return (sums.to(torch.float64) * scale.to(torch.float64).square().view_as(sums)).sum()


def _limit(dtype: torch.dtype) -> float:
    """Half a step beyond the largest float8 number of a format."""
    info = torch.finfo(dtype)
    return float(info.max + info.eps * 2.0 ** math.floor(math.log2(info.max)) / 2)
