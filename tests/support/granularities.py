"""Granularities that the library does not have, as CONTRIBUTING ("Adding a granularity") asks.

One scale per pair of neighbouring rows, and per pair of columns in the second GEMM. One scale per 4
values of a row, in one copy that serves both GEMMs and is gathered in float8.
"""

from collections.abc import Sequence
from typing import Any

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


class RowQuads(Granularity):
    """Shards must hold whole groups of 4."""

    name = "4 values of a row"
    can_gather = True

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, 4))

    def covered_dims(self, ndim: int) -> tuple[int, ...]:
        return (ndim - 1,)

    def offset(self, offset: Sequence[int]) -> list[int]:
        return [*offset[:-1], offset[-1] // 4, 0]

    def amax_axes(self, placements: Sequence[Placement], ndim: int) -> tuple[int, ...]:
        return ()

    def can_move(self, dims: Sequence[int], ndim: int) -> bool:
        return ROW.can_move(dims, ndim)

    def to_rows(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.squeeze(-1)

    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unsqueeze(-1)

    def gemm_scale(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.reshape(-1, scale.shape[-2]).repeat_interleave(4, dim=1)


ROW_PAIRS, COLUMN_PAIRS, ROW_QUADS = RowPairs(), ColumnPairs(), RowQuads()


def config_of(granularity: Granularity, **fields: Any) -> Float8LinearConfig:
    """All operands are cast alike."""
    cast = CastConfig(scaling_granularity=granularity, target_dtype=torch.float8_e4m3fn)
    operands = {f"cast_config_{operand}": cast for operand in ("input", "weight", "grad_output")}
    return Float8LinearConfig(**(operands | fields))


CONFIG = config_of(ROW_PAIRS)
GATHERED_CONFIG = config_of(ROW_QUADS)
