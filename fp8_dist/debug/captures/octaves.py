"""Histogram of a captured tensor's magnitudes in octaves, with the range of float8."""

import math
from dataclasses import dataclass

import torch

from fp8_dist.debug.captures.files import CapturedCast
from fp8_dist.scaling import as_matrix
from fp8_dist.tensor.ops import as_bytes


@dataclass(frozen=True)
class Float8Range:
    """Bounds of the magnitudes that a float8 format represents, for a scale.

    Attributes:
        largest: the largest number.
        normal: the smallest normal number.
        subnormal: the smallest nonzero number.
        zero: half of ``subnormal``; values up to this one are rounded to zero.
        saturation: values above this one are further than half a step from ``largest``.
    """

    largest: float
    normal: float
    subnormal: float
    zero: float
    saturation: float

    @staticmethod
    def of(dtype: torch.dtype, scale: float = 1.0) -> "Float8Range":
        """Return the range of a format whose numbers are multiplied by ``scale``."""
        info = torch.finfo(dtype)
        half_a_step = info.eps * 2.0 ** math.floor(math.log2(info.max)) / 2
        subnormal = info.smallest_normal * info.eps
        numbers = info.max, info.smallest_normal, subnormal, subnormal / 2, info.max + half_a_step
        return Float8Range(*(number * scale for number in numbers))


@dataclass(frozen=True)
class Octave:
    """Counts of the values in ``[2^exponent, 2^(exponent + 1))``, by the effect of the cast."""

    exponent: int
    kept: int = 0
    to_zero: int = 0
    saturated: int = 0

    @property
    def values(self) -> int:
        """Total number of values."""
        return self.kept + self.to_zero + self.saturated


@dataclass(frozen=True)
class Histogram:
    """Counts of a tensor's magnitudes.

    Attributes:
        octaves: without gaps, from the smallest magnitude to the largest.
        values: the number of values in the octaves. Zeros, NaN and infinities are not counted. If
            ``relative``, values whose scale is not finite are not counted either.
        zeros: the number of zeros.
        relative: whether each value was divided by its own scale, because there are several.
        range: the range of float8 in the same unit; None if the only scale is not finite.
    """

    octaves: tuple[Octave, ...]
    values: int
    zeros: int
    relative: bool
    range: Float8Range | None


def histogram(cast: CapturedCast) -> Histogram:
    """Return the histogram of the values before a cast.

    With one scale, magnitudes are those of the values. With a scale per row or column, no single
    range of float8 applies. Each value is then divided by its own scale, and the range is that of
    the format.
    """
    dtype, relative = cast.qdata.dtype, any(scale.ndim for scale in cast.scales)
    columns = cast.high.shape[-1] if cast.high.ndim else 1
    shape = math.prod(cast.high.shape[:-1]), columns
    matrix = as_matrix(cast.low)
    scale = matrix.scheme.element_scales(matrix.scales, shape, matrix.start).double()
    high = cast.high.reshape(shape).double()
    units = high / scale
    counted = units.isfinite() & (units != 0)
    if not relative and not scale.isfinite():
        counted = high.isfinite() & (high != 0)
    magnitudes = (units if relative else high)[counted].abs()
    low = as_bytes(cast.qdata.reshape(high.shape))[counted]
    to_zero = (low & 0x7F) == 0
    saturated = units[counted].abs() > Float8Range.of(dtype).saturation
    exponents = torch.frexp(magnitudes).exponent - 1  # frexp's mantissa is from 1/2 to 1
    first = int(exponents.min()) if len(exponents) else 0
    of_all, of_zero, of_saturated = (
        torch.bincount(exponents[chosen] - first).tolist()
        for chosen in (torch.ones_like(to_zero), to_zero, saturated)
    )
    of_zero += [0] * (len(of_all) - len(of_zero))
    of_saturated += [0] * (len(of_all) - len(of_saturated))
    octaves = [
        Octave(first + i, total - zero - beyond, zero, beyond)
        for i, (total, zero, beyond) in enumerate(zip(of_all, of_zero, of_saturated, strict=True))
    ]
    known = relative or bool(scale.isfinite())
    return Histogram(
        tuple(octaves),
        len(magnitudes),
        int((high == 0).sum()),
        relative,
        Float8Range.of(dtype, 1.0 if relative else scale.item()) if known else None,
    )
