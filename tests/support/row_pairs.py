"""Granularities that the library does not have: a scale per pair of neighbouring rows, or columns.

They are what CONTRIBUTING ("Adding a granularity") asks for: classes, and a config that uses them. The
GEMM takes their scales as those of rows and columns, so that no route of the GEMM is new.
"""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Placement

from fp8_dist import CastConfig, Float8LinearConfig
from fp8_dist.granularity import COLUMN, ROW, Granularity


class RowPairs(Granularity):
    """Shards must hold whole pairs."""

    name = "pair of rows"

    @property
    def second_use(self) -> Granularity:
        return COLUMN_PAIRS

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-2, (-1, 2))

    def covered_dims(self, ndim: int) -> tuple[int, ...]:
        return (ndim - 2, ndim - 1)

    def offset(self, offset: Sequence[int]) -> list[int]:
        return [*offset[:-2], offset[-2] // 2, 0, 0]

    def amax_axes(self, placements: Sequence[Placement], ndim: int) -> tuple[int, ...]:
        return ROW.amax_axes(placements, ndim)

    def can_move(self, dims: Sequence[int], ndim: int) -> bool:
        return not dims

    def gemm_scale(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.reshape(-1, 1).repeat_interleave(2, dim=0)


class ColumnPairs(Granularity):
    """Shards must hold whole pairs."""

    name = "pair of columns"

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, 2))

    def covered_dims(self, ndim: int) -> tuple[int, ...]:
        return (*range(ndim - 2), ndim - 1)

    def offset(self, offset: Sequence[int]) -> list[int]:
        return [*[0] * (len(offset) - 1), offset[-1] // 2, 0]

    def amax_axes(self, placements: Sequence[Placement], ndim: int) -> tuple[int, ...]:
        return COLUMN.amax_axes(placements, ndim)

    def can_move(self, dims: Sequence[int], ndim: int) -> bool:
        return not dims

    def gemm_scale(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.reshape(1, -1).repeat_interleave(2, dim=1)


ROW_PAIRS, COLUMN_PAIRS = RowPairs(), ColumnPairs()
_PAIRS = CastConfig(scaling_granularity=ROW_PAIRS, target_dtype=torch.float8_e4m3fn)
CONFIG = Float8LinearConfig(
    cast_config_input=_PAIRS, cast_config_weight=_PAIRS, cast_config_grad_output=_PAIRS
)
