"""A scaling scheme outside of the library, with two levels of scales; the example of CONTRIBUTING.

It has one fp32 scale per tensor, and one e4m3 scale per block of 16 values along the last dim, or
of 16 x 16 values of a weight: ``x ~= qdata * block scale * tensor scale``.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from half_octaves import half_octaves_config
from schemes import config_of
from torch import Tensor

from fp8_dist import Float8LinearConfig
from fp8_dist.scaling import Level, Scales, Scheme, Start, Statistics

E4M3 = torch.float8_e4m3fn
_LARGEST, _SMALLEST = 448.0, 2.0**-9  # of the scales of blocks


@dataclass(frozen=True, eq=False)
class TwoLevel(Scheme):
    """Blocks of ``rows x columns`` values."""

    family: ClassVar[str] = "two_level"
    can_gather: ClassVar[bool] = True

    rows: int = 1
    columns: int = 16

    def make_levels(self) -> tuple[Level, ...]:
        return Level(None, None, None), Level(self.rows, self.columns, scale=E4M3)

    def transposed(self) -> "TwoLevel":
        return replace(self, rows=self.columns, columns=self.rows)

    def measure(self, x: Tensor, start: Start = (0, 0)) -> Statistics:
        """The amaxes of the tensor and of its blocks."""
        tensor, blocks = self.levels
        return tensor.amax(x), blocks.amax(x, start)

    def scales_from(self, statistics: Statistics) -> Scales:
        """Choose the tensor scale so that the tensor's amax has block scale 448 and value 448."""
        amax, blocks = statistics
        tensor = (amax / _LARGEST**2).clamp(min=1e-30)
        return tensor, (blocks / _LARGEST / tensor).clamp(_SMALLEST, _LARGEST).to(E4M3)


def two_level_config() -> Float8LinearConfig:
    """A config for all operands. The weight has square blocks, so one copy serves both GEMMs."""
    return config_of(TwoLevel(rows=16), TwoLevel())


def config_named(name: str) -> Float8LinearConfig:
    """The config of a recipe, or of ``"two levels"``, ``"half octaves"`` or ``"fp32 blocks"``."""
    if name == "two levels":
        return two_level_config()
    if name == "half octaves":
        return half_octaves_config()
    if name == "fp32 blocks":
        return Float8LinearConfig.from_recipe_name("blockwise", scale_format="fp32")
    return Float8LinearConfig.from_recipe_name(name)
