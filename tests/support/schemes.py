"""Scaling schemes that the library does not have, as CONTRIBUTING ("Adding a scheme") asks.

One scale per pair of neighbouring rows, and per pair of columns in the second GEMM. One scale per 4
values of a row, in one copy that serves both GEMMs and is gathered in float8.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from fp8_dist import CastConfig, Float8LinearConfig
from fp8_dist.kernels import scaling_from_amax
from fp8_dist.scaling import Level, Scales, Scheme, Start, Statistics


class OfBlocks(Scheme):
    """One level of fp32 scales, from amaxes."""

    def measure(self, x: torch.Tensor, start: Start = (0, 0)) -> Statistics:
        return (self.levels[0].amax(x, start),)

    def scales_from(self, statistics: Statistics) -> Scales:
        return (scaling_from_amax(statistics[0], self.dtype, False)[1],)


@dataclass(frozen=True, eq=False)
class Pairs(OfBlocks):
    """One scale per pair of neighbouring rows, or columns."""

    family = "pairs"

    of: str = "rows"

    def make_levels(self) -> tuple[Level, ...]:
        return (Level(2, None) if self.of == "rows" else Level(None, 2, None),)

    @property
    def covers(self) -> str:
        return f"pair of {self.of}"

    @property
    def second(self) -> "Pairs":
        return replace(self, of="columns")

    def turned(self) -> "Pairs":
        return replace(self, of="columns" if self.of == "rows" else "rows")


@dataclass(frozen=True, eq=False)
class Quads(OfBlocks):
    """One scale per 4 values of a row, or of a column."""

    family = "quads"
    can_gather = True

    of: str = "row"

    def make_levels(self) -> tuple[Level, ...]:
        return (Level(1, 4) if self.of == "row" else Level(4, 1),)

    @property
    def covers(self) -> str:
        return f"4 values of a {self.of}"

    def turned(self) -> "Quads":
        return replace(self, of="column" if self.of == "row" else "row")


ROW_PAIRS, COLUMN_PAIRS, ROW_QUADS = Pairs(), Pairs(of="columns"), Quads()


def config_of(scheme: Scheme, **fields: Any) -> Float8LinearConfig:
    """All operands are cast alike."""
    cast = CastConfig(scaling_granularity=scheme)
    operands = {f"cast_config_{operand}": cast for operand in ("input", "weight", "grad_output")}
    return Float8LinearConfig(**(operands | fields))


CONFIG = config_of(ROW_PAIRS)
GATHERED_CONFIG = config_of(ROW_QUADS)
