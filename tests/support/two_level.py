"""A scaling scheme that the library does not know: two levels of scales.

One fp32 scale per tensor, and one e4m3 scale per block of 16 values along the last dim, or of 16 x 16
values of a weight: ``x ~= qdata * block scale * tensor scale``. It is the example of CONTRIBUTING.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp8_dist import CastConfig, Float8LinearConfig
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

    def turned(self) -> "TwoLevel":
        return replace(self, rows=self.columns, columns=self.rows)

    def measure(self, x: Tensor, start: Start = (0, 0)) -> Statistics:
        """The amax of the tensor and those of its blocks: the former is the largest of the latter."""
        blocks = x.abs().to(torch.float32)
        for dim, size, first in ((-1, self.columns, start[1]), (-2, self.rows, start[0])):
            if size > 1 and x.numel():
                count, begin = x.shape[dim], first % size
                pad = (
                    [0, 0, begin, -(begin + count) % size]
                    if dim == -2
                    else [begin, -(begin + count) % size]
                )
                blocks = torch.nn.functional.pad(blocks, pad)
                blocks = blocks.unflatten(dim, (-1, size)).amax(dim)
        if not x.numel():
            blocks = x.new_zeros(self.levels[1].shape(x.shape, start), dtype=torch.float32)
        return blocks.amax() if x.numel() else blocks.new_zeros(()), blocks

    def scales_from(self, statistics: Statistics) -> Scales:
        """Block scales of 448 and values of 448 fit below the tensor's amax."""
        amax, blocks = statistics
        tensor = (amax / _LARGEST**2).clamp(min=1e-30)
        return tensor, (blocks / _LARGEST / tensor).clamp(_SMALLEST, _LARGEST).to(E4M3)


def two_level_config(**fields: Any) -> Float8LinearConfig:
    """All operands in two levels; the weight in squares, of which one copy serves both GEMMs."""
    rows = CastConfig(scaling_granularity=TwoLevel())
    weight = CastConfig(scaling_granularity=TwoLevel(rows=16))
    casts = {
        "cast_config_input": rows,
        "cast_config_weight": weight,
        "cast_config_grad_output": rows,
    }
    return Float8LinearConfig(**(casts | fields))
