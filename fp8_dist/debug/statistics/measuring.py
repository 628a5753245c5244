"""Counts and sums over a cast, from which its statistics follow; those of several casts combine."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, cast

import torch

from fp8_dist.kernels.cpu.upcast import as_half, upcast
from fp8_dist.tensor import Quantized

# An operand is read in parts of so many elements: on CPUs they fit into a cache, on GPUs their
# copies in fp32 take little memory.
_CPU_PART, _PART = 2**16, 2**24
# If the amax lies between these, fp32 squares neither overflow nor lose what matters.
_SMALLEST, _LARGEST = 2.0**-40, 2.0**40
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
# All bits but the sign. (A Python number would be made a tensor in each call.)
_MAGNITUDE = {
    size: torch.tensor(2 ** (8 * size - 1) - 1, dtype=dtype, device="cpu")
    for size, dtype in _INTEGERS.items()
}


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
    """:func:`measure_casts` of one cast: fp64 ``[10]``."""
    return measure_casts(high, [low], rank)[0]


def measure_casts(high: torch.Tensor, lows: Sequence[Quantized], rank: int) -> list[torch.Tensor]:
    """The :class:`Measures` of casts of one operand: fp64 ``[10]`` each, on its device.

    No host synchronization. What depends on the operand alone is measured once.

    A value saturates if it lies beyond what rounding brings to the largest float8 number, in either
    direction. A dynamic scale lets none saturate.

    Args:
        high: ``[..., K]``, local, in high precision.
        lows: its float8 copies.
        rank: of this process.
    """
    rows, columns = math.prod(high.shape[:-1]), high.shape[-1] if high.ndim else 1
    if not high.numel():
        return [nothing(high.device) for _ in lows]
    size = max(1, (_CPU_PART if high.is_cpu else _PART) // columns)
    casts = [_Cast.of(low, rows, columns, size) for low in lows]
    found: list[list[_Numbers]] = [[] for _ in lows]
    for i, part in enumerate(high.detach().reshape(rows, columns).split(size)):
        operand = _Operand(part)
        for numbers, (qdata, scales, covered) in zip(found, casts, strict=True):
            numbers.append(_measure(operand, qdata[i], scales[i], covered))
    return [
        _total(numbers, low.granularity.scale_values(low.scale), rank)
        for numbers, low in zip(found, lows, strict=True)
    ]


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


class _Operand:
    """A part of an operand in high precision, ``[M, K]``, and what its casts share."""

    def __init__(self, high: torch.Tensor) -> None:
        self.high = high
        # In fp32 or wider, not to be written to.
        self.x = high.to(torch.promote_types(high.dtype, torch.float32))
        self._bits = _magnitude_bits(high)

    def amaxes(self, dims: tuple[int, ...]) -> torch.Tensor:
        """Over some dims, which are kept; a new tensor of the dtype of ``x``."""
        return self._bits.amax(dims, keepdim=True).view(self.high.dtype).to(self.x.dtype)

    @cached_property
    def amax(self) -> torch.Tensor:
        """Of all values, 0-dim."""
        return self._bits.max().view(self.high.dtype)

    @cached_property
    def values(self) -> torch.Tensor:
        """How many are not zero."""
        return torch.count_nonzero(self._bits)

    @cached_property
    def nonfinite(self) -> torch.Tensor:
        """How many are not finite."""
        return torch.count_nonzero(torch.sub(self.high, self.high))  # NaN of NaN and Inf

    @cached_property
    def amax_on_host(self) -> float:
        """``amax`` as a number."""
        return self.amax.item()

    @cached_property
    def values_on_host(self) -> int:
        """``values`` as a number."""
        return int(self.values.item()) if self._bits.min().item() == 0 else self._bits.numel()

    @cached_property
    def signal_on_host(self) -> float:
        """The sum of squares, if they neither overflow nor vanish."""
        return _square_sum(self.x).item()


class _Scale(NamedTuple):
    """The scales of a part of a cast: 0-dim, ``[M, 1]``, ``[1, K]`` or ``[M, K]``."""

    scale: torch.Tensor
    reciprocal: torch.Tensor


class _Cast(NamedTuple):
    """A cast, in parts.

    Attributes:
        qdata, scales: of each part.
        covered: the dims of which a scale covers all.
    """

    qdata: Sequence[torch.Tensor]
    scales: Sequence[_Scale]
    covered: tuple[int, ...]

    @classmethod
    def of(cls, low: Quantized, rows: int, columns: int, size: int) -> "_Cast":
        """``low`` as a matrix, in parts of so many rows."""
        qdata = low.qdata.detach().reshape(rows, columns).split(size)
        scale = low.granularity.matrix_scale(low.scale.detach(), (rows, columns))
        reciprocal = scale.reciprocal()
        by_row = scale.ndim > 0 and scale.shape[0] == rows
        if by_row:
            scales = [*map(_Scale, scale.split(size), reciprocal.split(size))]
        else:
            scales = [_Scale(scale, reciprocal)] * len(qdata)
        covered: tuple[int, ...] = (0, 1)
        if scale.ndim:
            covered = tuple(d for d in (0, 1) if scale.shape[d] == 1 and (d == 1 or not by_row))
        return cls(qdata, scales, covered)


# What is measured of a part: ``amax`` and the fields of :class:`Measures` from ``values`` on. Of
# CPUs they are read at once, of other devices they are a tensor ``[7]``.
_Numbers = tuple[float, ...] | torch.Tensor


def _total(parts: list[_Numbers], scale: torch.Tensor, rank: int) -> torch.Tensor:
    """The measures of a cast from those of its parts."""
    if scale.is_cpu:
        table = torch.tensor(parts, dtype=torch.float64)
    else:
        table = torch.stack(cast("list[torch.Tensor]", parts))
    total = nothing(scale.device)
    total[0], total[1], total[2] = table[:, 0].amax(), scale.max(), -scale.min()
    total[MAXIMA:] = table[:, 1:].sum(0)
    total[3] = torch.where(total[7] > 0, -float(rank), -math.inf)
    return total


def _measure(
    operand: _Operand, qdata: torch.Tensor, scales: _Scale, covered: tuple[int, ...]
) -> _Numbers:
    limit = _limit(qdata.dtype)
    if not operand.high.is_cpu:  # the host would have to wait for the answer
        numbers = _measure_any(operand, qdata, scales, covered, limit)
        return torch.stack([number.to(torch.float64) for number in numbers])
    if _is_normal(operand, scales, covered, limit):
        return _measure_normal(operand, qdata, scales, 0 if covered else limit)
    return tuple(n.item() for n in _measure_any(operand, qdata, scales, covered, limit))


def _is_normal(operand: _Operand, scales: _Scale, covered: tuple[int, ...], limit: float) -> bool:
    """Whether values are of usual magnitude, and none saturates unless scales are those of blocks.

    (By the rule *floor* many do, in most parts, by little.)
    """
    amax = operand.amax_on_host
    if not (amax == 0 or _SMALLEST <= amax <= _LARGEST):
        return False
    scale, reciprocal = scales
    if scale.ndim == 0:
        return amax <= limit * scale.item()
    return not covered or operand.amaxes(covered).mul_(reciprocal).max().item() <= limit


def _measure_normal(
    operand: _Operand, qdata: torch.Tensor, scales: _Scale, limit: float
) -> tuple[float, ...]:
    """What is measured of a part on a CPU whose values :func:`_is_normal`.

    ``limit``: beyond which values saturate, 0 where none does.
    """
    scale, saturated = scales.scale, 0
    if limit and operand.x.numel():
        units = operand.x.abs().mul_(scales.reciprocal)
        if units.max().item() > limit:
            saturated = int(torch.count_nonzero(units > limit).item())
    codes = _magnitude_bits(qdata)
    values = left = qdata.numel()
    if not codes.all():
        values, left = operand.values_on_host, int(torch.count_nonzero(codes).item())
    half, factor = as_half(qdata)
    noise = half.to(operand.x.dtype)
    torch.addcmul(operand.x, noise, scale, value=-factor, out=noise)
    squares = operand.signal_on_host, _square_sum(noise).item()
    return operand.amax_on_host, values, values - left, saturated, 0, *squares


def _measure_any(
    operand: _Operand,
    qdata: torch.Tensor,
    scales: _Scale,
    covered: tuple[int, ...],
    limit: float,
) -> tuple[torch.Tensor, ...]:
    """What is measured of a part, 0-dim tensors.

    Squares are summed over what each scale covers and in units of it: they neither overflow nor
    vanish in fp32.
    """
    x = operand.x * scales.reciprocal
    values, left = operand.values, torch.count_nonzero(_magnitude_bits(qdata))
    saturated = torch.count_nonzero(x.abs() > limit)
    low = upcast(qdata, x.dtype) if qdata.is_cpu else qdata.to(x.dtype)
    unit = scales.scale.to(torch.float64).square()
    signal, noise = (
        (_squares(each, covered).to(torch.float64) * unit).sum() for each in (x, low - x)
    )
    return operand.amax, values, values - left, saturated, operand.nonfinite, signal, noise


def _magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of ``x.abs()`` as integers, which are ordered as they are, with NaN above inf."""
    return x.view(_INTEGERS[x.itemsize]) & _MAGNITUDE[x.itemsize]


def _squares(x: torch.Tensor, covered: tuple[int, ...]) -> torch.Tensor:
    """The sum of squares over the dims that a scale covers."""
    if len(covered) == 2:
        return _square_sum(x)
    if not covered:
        return x.square()
    (dim,) = covered
    return torch.linalg.vecdot(x, x, dim=dim).unsqueeze(dim)


def _square_sum(x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(-1)
    return torch.dot(x, x)


def _limit(dtype: torch.dtype) -> float:
    """Half a step beyond the largest float8 number of a format."""
    info = torch.finfo(dtype)
    return float(info.max + info.eps * 2.0 ** math.floor(math.log2(info.max)) / 2)
