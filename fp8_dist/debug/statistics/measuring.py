"""Measures of casts: counts and sums from which statistics follow, and that can be combined."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, cast

import torch

from fp8_dist.kernels.cpu.upcast import as_half, upcast
from fp8_dist.scaling import Quantized, as_matrix

# Elements per part in which an operand is read. On CPUs a part fits into a cache. On GPUs its copy
# in fp32 takes little memory.
_CPU_PART, _PART = 2**16, 2**24
# If the amax lies between these, fp32 squares neither overflow nor lose relevant values.
_SMALLEST, _LARGEST = 2.0**-40, 2.0**40
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
# Masks of all bits but the sign, as tensors: a Python number would become one in each call.
_MAGNITUDE = {
    size: torch.tensor(2 ** (8 * size - 1) - 1, dtype=dtype, device="cpu")
    for size, dtype in _INTEGERS.items()
}


class Measures(NamedTuple):
    """Measures of one or several casts, one fp64 number each.

    Combined by their maximum: ``amax`` (of the operand), ``scale`` (the largest one),
    ``minus_scale`` (the smallest one, negated), ``minus_rank`` (the first rank with a value that
    is not finite, negated; -inf: none).
    Combined by their sum: the number of ``values`` that are not zero in high precision, and of
    those that ``underflow`` (are zero in float8), that saturate (``saturated``) and that are
    ``nonfinite``; the squares of the operand (``signal``) and of the cast's errors (``noise``).
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


MAXIMA = 4  # the number of leading fields that are combined by their maximum


def measure(high: torch.Tensor, low: Quantized, rank: int) -> torch.Tensor:
    """Return the :class:`Measures` of one cast, as :func:`measure_casts` does: fp64 ``[10]``."""
    return measure_casts(high, [low], rank)[0]


def measure_casts(high: torch.Tensor, lows: Sequence[Quantized], rank: int) -> list[torch.Tensor]:
    """Return the :class:`Measures` of casts of one operand: fp64 ``[10]`` each, on its device.

    On a GPU there is no host synchronization. Measures of the operand alone are taken once.

    A value saturates if it lies beyond the values that round to the largest float8 number, in
    either direction. No value saturates under a dynamic scale, except by the block rule *floor*.

    Args:
        high: ``[..., K]``, local, in high precision.
        lows: its float8 copies.
        rank: the rank of this process.
    """
    rows, columns = math.prod(high.shape[:-1]), high.shape[-1] if high.ndim else 1
    if not high.numel():
        return [nothing(high.device) for _ in lows]
    size = max(1, (_CPU_PART if high.is_cpu else _PART) // columns)
    casts = [_Cast.of(low, rows, columns, size) for low in lows]
    found: list[list[_Numbers]] = [[] for _ in lows]
    for i, part in enumerate(high.detach().reshape(rows, columns).split(size)):
        operand = _Operand(part)
        for numbers, made in zip(found, casts, strict=True):
            numbers.append(_measure(operand, made.qdata[i], made.scales[i], made.covered))
    each = zip(found, casts, strict=True)
    return [_total(numbers, made.scale, rank) for numbers, made in each]


def measure_product(exact: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return the :class:`Measures` of a GEMM's result: ``signal`` and ``noise`` alone.

    Args:
        exact: the result for high-precision operands, fp32.
        found: the result for float8 operands, of the same shape.
    """
    total = nothing(exact.device)
    total[1] = total[2] = 0.0
    total[8] = exact.to(torch.float64).square().sum()
    total[9] = (found - exact).to(torch.float64).square().sum()
    return total


def nothing(device: torch.device | str) -> torch.Tensor:
    """Return the measures of zero casts, the identity of :func:`combine_`."""
    total = torch.zeros(len(Measures._fields), dtype=torch.float64, device=device)
    total[1:MAXIMA] = -math.inf
    return total


def combine_(total: torch.Tensor, more: torch.Tensor) -> None:
    """Add the measures ``[..., 10]`` of further casts of the same operands to a total, in place."""
    maxima = torch.maximum(total[..., :MAXIMA], more[..., :MAXIMA])  # propagates NaN
    total[..., MAXIMA:] += more[..., MAXIMA:]
    total[..., :MAXIMA] = maxima


class _Operand:
    """Part of an operand in high precision, ``[M, K]``, and the measures that its casts share."""

    def __init__(self, high: torch.Tensor) -> None:
        self.high = high
        # In fp32 or wider, not to be written to.
        self.x = high.to(torch.promote_types(high.dtype, torch.float32))
        self._bits = _magnitude_bits(high)

    def amaxes(self, dims: tuple[int, ...]) -> torch.Tensor:
        """Return the amaxes over ``dims``, which are kept; a new tensor of the dtype of ``x``."""
        return self._bits.amax(dims, keepdim=True).view(self.high.dtype).to(self.x.dtype)

    @cached_property
    def amax(self) -> torch.Tensor:
        """Amax of all values, 0-dim."""
        return self._bits.max().view(self.high.dtype)

    @cached_property
    def values(self) -> torch.Tensor:
        """Number of values that are not zero."""
        return torch.count_nonzero(self._bits)

    @cached_property
    def nonfinite(self) -> torch.Tensor:
        """Number of values that are not finite."""
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
        """The sum of squares, which is exact only if they neither overflow nor vanish."""
        return _square_sum(self.x).item()


class _Scale(NamedTuple):
    """Scales of a part of a cast: 0-dim, ``[M, 1]``, ``[1, K]`` or ``[M, K]``."""

    scale: torch.Tensor
    reciprocal: torch.Tensor


class _Cast(NamedTuple):
    """Cast, divided into parts.

    Attributes:
        scale: all scales.
        qdata, scales: the data and the scales of each part.
        covered: the dims of a part that a scale covers completely.
    """

    scale: torch.Tensor
    qdata: Sequence[torch.Tensor]
    scales: Sequence[_Scale]
    covered: tuple[int, ...]

    @classmethod
    def of(cls, low: Quantized, rows: int, columns: int, size: int) -> "_Cast":
        """Divide ``low``, as a matrix, into parts of ``size`` rows."""
        matrix = as_matrix(low)
        qdata = matrix.qdata.detach().reshape(rows, columns).split(size)
        values = tuple([scale.detach() for scale in matrix.scales])
        scale = low.scheme.element_scales(values, (rows, columns), low.start)
        reciprocal = scale.reciprocal()
        by_row = scale.ndim > 0 and scale.shape[0] == rows
        if by_row:
            scales = [*map(_Scale, scale.split(size), reciprocal.split(size))]
        else:
            scales = [_Scale(scale, reciprocal)] * len(qdata)
        covered: tuple[int, ...] = (0, 1)
        if scale.ndim:
            covered = tuple(d for d in (0, 1) if scale.shape[d] == 1 and (d == 1 or not by_row))
        return cls(scale, qdata, scales, covered)


# Measures of a part: ``amax`` and the fields of :class:`Measures` from ``values`` on. They are
# Python numbers on CPUs, and a tensor ``[7]`` on other devices.
_Numbers = tuple[float, ...] | torch.Tensor


def _total(parts: list[_Numbers], scale: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the measures of a cast, given those of its parts."""
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
    if not operand.high.is_cpu:  # reading the amax would synchronize the host
        numbers = _measure_any(operand, qdata, scales, covered, limit)
        return torch.stack([number.to(torch.float64) for number in numbers])
    if _is_normal(operand, scales, covered, limit):
        return _measure_normal(operand, qdata, scales, 0 if covered else limit)
    return tuple(n.item() for n in _measure_any(operand, qdata, scales, covered, limit))


def _is_normal(operand: _Operand, scales: _Scale, covered: tuple[int, ...], limit: float) -> bool:
    """Whether magnitudes are usual and, unless scales are per block, no value saturates.

    By the block rule *floor*, many values in most parts saturate slightly.
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
    """Measure a part on a CPU for which :func:`_is_normal` is true.

    Values beyond ``limit`` saturate; 0: no value does.
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
    """Measure any part, as 0-dim tensors.

    Squares are summed over the values that each scale covers, in units of the scale, so that they
    neither overflow nor vanish in fp32.
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
    """Return the bits of ``x.abs()`` as integers, in the same order, with NaN above inf."""
    return x.view(_INTEGERS[x.itemsize]) & _MAGNITUDE[x.itemsize]


def _squares(x: torch.Tensor, covered: tuple[int, ...]) -> torch.Tensor:
    """Return the sum of squares over the dims that a scale covers."""
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
    """Return the limit of saturation: half a step beyond the format's largest number."""
    info = torch.finfo(dtype)
    return float(info.max + info.eps * 2.0 ** math.floor(math.log2(info.max)) / 2)
