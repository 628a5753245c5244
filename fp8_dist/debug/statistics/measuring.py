"""Counts and sums over a cast, from which its statistics follow; those of several casts combine."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fp8_dist.kernels.cpu.upcast import upcast
from fp8_dist.tensor import Quantized
from fp8_dist.tensor.ops import as_bytes

# A cast is read in parts of so many elements: on CPUs they fit into a cache, on GPUs their copies
# in fp32 take little memory.
_CPU_PART, _PART = 2**16, 2**24
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


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
    covered: tuple[int, ...] = (0, 1)  # the dims of which a scale covers all
    if scale.ndim:
        covered = tuple(d for d in (0, 1) if scale.shape[d] == 1 and (d == 1 or not by_row))
    parts = [
        _measure(high[part], qdata[part], scale[part] if by_row else scale, covered)
        for part in _parts(high)
    ]
    amax, *counts, signal, noise = zip(*parts, strict=True)
    total[0], total[1], total[2] = torch.stack(amax).amax(), scale.max(), -scale.min()
    total[4:8] = torch.stack([torch.stack(column).sum() for column in counts])
    total[3] = torch.where(total[7] > 0, -float(rank), -math.inf)
    # [rows, 1], [1, columns] or 0-dim, as the scale.
    join = torch.cat if by_row else torch.stack
    squares = scale.to(torch.float64).square()
    for i, sums in ((8, signal), (9, noise)):
        whole = join(sums).to(torch.float64)
        total[i] = ((whole if by_row else whole.sum(0)) * squares).sum()
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
    rows = max(1, (_CPU_PART if x.is_cpu else _PART) // x.shape[1])
    return (slice(first, first + rows) for first in range(0, len(x), rows))


def _measure(
    high: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, covered: tuple[int, ...]
) -> tuple[torch.Tensor, ...]:
    """What is measured of a part: ``amax`` and four counts of :class:`Measures`, 0-dim.

    And the sums of squares, of what each scale covers and in units of it: they neither overflow nor
    vanish in fp32.
    """
    bits, limit = _magnitude_bits(high), _limit(qdata.dtype)
    amax = bits.max().view(high.dtype)
    x = high.to(torch.promote_types(high.dtype, torch.float32), copy=True).mul_(scale.reciprocal())
    # (On other devices the host would have to wait for the answer.)
    is_normal = high.is_cpu and _are_within(x, amax, scale, limit)
    left = torch.count_nonzero(as_bytes(qdata) & 0x7F)
    values = left if is_normal and left == high.numel() else torch.count_nonzero(bits)
    saturated = nonfinite = torch.zeros_like(values)
    if not is_normal:
        saturated = torch.count_nonzero(x.abs() > limit)
        nonfinite = torch.count_nonzero(torch.sub(high, high))  # NaN of NaN and Inf
    low = upcast(qdata, x.dtype, is_finite=is_normal) if qdata.is_cpu else qdata.to(x.dtype)
    signal, noise = _squares(x, covered), _squares(low.sub_(x), covered)
    return amax, values, values - left, saturated, nonfinite, signal, noise


def _magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of ``x.abs()`` as integers, which are ordered as they are, with NaN above inf."""
    integer = _INTEGERS[x.itemsize]
    return x.view(integer) & torch.iinfo(integer).max


def _are_within(x: torch.Tensor, amax: torch.Tensor, scale: torch.Tensor, limit: float) -> bool:
    """Whether values ``x``, in units of the scale, are at most ``limit``; their amax is known."""
    if scale.ndim == 0:
        return amax.item() <= min(limit * scale.item(), torch.finfo(x.dtype).max)
    return bool(_magnitude_bits(x).max().view(x.dtype) <= limit)


def _squares(x: torch.Tensor, covered: tuple[int, ...]) -> torch.Tensor:
    """The sum of squares over the dims that a scale covers."""
    if len(covered) == 2:
        return torch.dot(x.reshape(-1), x.reshape(-1))
    if not covered:
        return x.square()
    (dim,) = covered
    return torch.linalg.vecdot(x, x, dim=dim).unsqueeze(dim)


def _limit(dtype: torch.dtype) -> float:
    """Half a step beyond the largest float8 number of a format."""
    info = torch.finfo(dtype)
    return float(info.max + info.eps * 2.0 ** math.floor(math.log2(info.max)) / 2)
