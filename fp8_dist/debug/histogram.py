"""The numbers that describe a captured cast: a histogram of its magnitudes, and its statistics."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fp8_dist.debug.capturing import CapturedCast
from fp8_dist.debug.measures import matrix_scales, saturation_limit
from fp8_dist.debug.rows import product
from fp8_dist.device import short_name
from fp8_dist.kernels.encoding import as_bytes


@dataclass(frozen=True)
class Float8Range:
    """The bounds of the magnitudes that a float8 format represents, for a given scale."""

    largest: float
    normal: float  # the smallest one
    subnormal: float  # the smallest nonzero one
    zero: float  # half of it; magnitudes up to this one are rounded to zero

    @staticmethod
    def of(dtype: torch.dtype, scale: float = 1.0) -> "Float8Range":
        """Return the range of a format whose numbers are multiplied by ``scale``."""
        info = torch.finfo(dtype)
        subnormal = info.smallest_normal * info.eps
        numbers = info.max, info.smallest_normal, subnormal, subnormal / 2
        return Float8Range(*(number * scale for number in numbers))


@dataclass(frozen=True)
class Octave:
    """The counts of the values in ``[2^exponent, 2^(exponent + 1))``, by the effect of the cast."""

    exponent: int
    kept: int = 0
    to_zero: int = 0
    saturated: int = 0

    @property
    def values(self) -> int:
        """The total number of values."""
        return self.kept + self.to_zero + self.saturated


@dataclass(frozen=True)
class Histogram:
    """The counts of a tensor's magnitudes, by octave.

    Attributes:
        octaves: all octaves from the smallest magnitude to the largest, including empty ones.
        values: the number of values in the octaves. Zeros, NaN and infinities are not counted, nor
            are values that are divided by a scale that is not finite.
        unit: what the magnitudes are: ``"of a value"``, or ``"divided by the scale of its row"``.
        range: the range of float8 in the same unit; None if the only scale is not finite.
    """

    octaves: tuple[Octave, ...]
    values: int
    unit: str
    range: Float8Range | None


def histogram(cast: CapturedCast) -> Histogram:
    """Return the histogram of the values before a cast.

    With one scale, the histogram counts the magnitudes of the values themselves. With several
    scales, no single range of float8 applies to all values. Then each value is divided by its own
    scale, and the range is that of the format.
    """
    dtype, relative = cast.qdata.dtype, any(scale.ndim for scale in cast.scales)
    columns = cast.high.shape[-1] if cast.high.ndim else 1
    shape = math.prod(cast.high.shape[:-1]), columns
    scale = matrix_scales(cast.low).double()
    high = cast.high.reshape(shape).double()
    known, units = relative or bool(scale.isfinite()), high / scale
    of = units if known else high
    counted = of.isfinite() & (of != 0)
    magnitudes = (units if relative else high)[counted].abs()
    low = as_bytes(cast.qdata.reshape(high.shape))[counted]
    to_zero = (low & 0x7F) == 0
    saturated = units[counted].abs() > saturation_limit(dtype)
    exponents = torch.frexp(magnitudes).exponent - 1  # its mantissa is in [1/2, 1)
    first, last = (int(exponents.min()), int(exponents.max())) if len(exponents) else (0, -1)
    effects = to_zero + 2 * saturated  # indices of kept, to_zero and saturated
    cells = torch.bincount(3 * (exponents - first) + effects, minlength=3 * (last - first + 1))
    octaves = [Octave(first + i, *counts) for i, counts in enumerate(cells.view(-1, 3).tolist())]
    limits = Float8Range.of(dtype, 1.0 if relative else scale.item()) if known else None
    unit = f"divided by the scale of its {cast.granularity}" if relative else "of a value"
    return Histogram(tuple(octaves), len(magnitudes), unit, limits)


def facts(cast: CapturedCast) -> Iterator[str]:
    """Yield lines about a cast: its layer and operand, its scale, and its statistics."""
    stats = cast.stats()
    shape, dtype = list(cast.high.shape), short_name(cast.qdata.dtype)
    kind = "delayed" if cast.delayed else "dynamic"
    several = "" if stats.scale == stats.scale_min else f" ({stats.scale_min:.4g} the smallest)"
    fqn = "".join(c if c.isprintable() else "?" for c in cast.fqn)  # no terminal control codes
    yield f"{fqn}: {product(cast.operand, cast.folded)}, for {', '.join(cast.gemms)}"
    yield f"  step {cast.step}, rank {cast.rank}, call {cast.call}"
    yield f"  shape       {shape}, {cast.high.dtype} to {dtype}"
    yield f"  amax        {stats.amax:.4g}"
    yield f"  scale       {stats.scale:.4g}{several}, {kind}, one per {cast.granularity}"
    yield f"  underflow   {stats.underflow:.4g} % of the non-zero values become zero"
    yield f"  saturation  {stats.saturation:.4g} % are beyond the largest float8 number"
    yield f"  non-finite  {stats.nonfinite:.4g} % are NaN or infinite"
    yield f"  SQNR        {stats.sqnr:.2f} dB"
