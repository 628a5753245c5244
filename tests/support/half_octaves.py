"""A scaling scheme whose scales are powers of sqrt(2), two per octave.

There is one fp32 scale per 20 values of a row, or per 20 x 20 values of a weight: the amax divided
by the largest value of the float8 dtype, rounded up to ``2 ** (k / 2)``.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from schemes import config_of
from torch import Tensor

from fp8_dist import Float8LinearConfig
from fp8_dist.scaling import Level, Scales, Scheme, Start, Statistics

_FRACTION, _SQRT_2 = 0x7FFFFF, 0x3504F3  # fp32 bits: the mask of fractions; the fraction of sqrt(2)


@dataclass(frozen=True, eq=False)
class HalfOctaves(Scheme):
    """Blocks of ``rows x columns`` values."""

    family: ClassVar[str] = "half_octaves"
    can_gather: ClassVar[bool] = True

    rows: int = 1
    columns: int = 20

    def make_levels(self) -> tuple[Level, ...]:
        return (Level(self.rows, self.columns),)

    def transposed(self) -> "HalfOctaves":
        return replace(self, rows=self.columns, columns=self.rows)

    def measure(self, x: Tensor, start: Start = (0, 0)) -> Statistics:
        """The amaxes of the blocks."""
        return (self.levels[0].amax(x, start),)

    def scales_from(self, statistics: Statistics) -> Scales:
        """Round on the bits, because the last bits of log2 and exp2 depend on strides."""
        least = (statistics[0] / torch.finfo(self.dtype).max).clamp(min=2.0**-100)
        bits = least.view(torch.int32)
        fraction, power = bits & _FRACTION, bits & ~_FRACTION
        above = torch.where(fraction > _SQRT_2, power + _FRACTION + 1, power | _SQRT_2)
        scale = torch.where(fraction == 0, power, above).view(torch.float32)
        return (torch.where(least.isfinite(), scale, least),)


def half_octaves_config() -> Float8LinearConfig:
    """A config for all operands. The weight has square blocks, so one copy serves both GEMMs."""
    return config_of(HalfOctaves(rows=20), HalfOctaves())
