"""Scaling schemes outside of the library, written as in CONTRIBUTING ("Adding a scaling scheme").

`Pairs` has one scale per two adjacent rows of a weight, or columns in the second GEMM. `Quads` has
one scale per 4 values of a row, in one copy that serves both GEMMs and is gathered in float8.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from fp8_dist import CastConfig, Float8LinearConfig
from fp8_dist.kernels.scale import scaling_from_amax
from fp8_dist.scaling import Level, Scales, Scheme, Start, Statistics


class OfBlocks(Scheme):
    """A base class of schemes with one level of fp32 scales, from amaxes."""

    def measure(self, x: torch.Tensor, start: Start = (0, 0)) -> Statistics:
        return (self.levels[0].amax(x, start),)

    def scales_from(self, statistics: Statistics) -> Scales:
        return (scaling_from_amax(statistics[0], self.dtype, False)[1],)


@dataclass(frozen=True, eq=False)
class Pairs(OfBlocks):
    """One scale per two adjacent rows or columns of a weight; for inputs and gradients, per row."""

    family = "pairs"

    of: str = "rows"
    size: int = 2

    def make_levels(self) -> tuple[Level, ...]:
        rows = self.of == "rows"
        return (Level(self.size, None) if rows else Level(None, self.size, None),)

    @property
    def covers(self) -> str:
        return f"pair of {self.of}" if self.size > 1 else f"one of {self.of}"

    @property
    def for_row_contraction(self) -> "Pairs":
        return Pairs(self.dtype, "columns")

    def transposed(self) -> "Pairs":
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

    def transposed(self) -> "Quads":
        return replace(self, of="column" if self.of == "row" else "row")


ROW_PAIRS, COLUMN_PAIRS, ROW_QUADS = Pairs(), Pairs(of="columns"), Quads()
SINGLE_ROWS = Pairs(size=1)


def config_of(scheme: Scheme, tokens: Scheme | None = None, **fields: Any) -> Float8LinearConfig:
    """A config with ``scheme`` for the weight, and ``tokens`` (or the same) for other operands."""
    names = ("cast_config_weight", "cast_config_input", "cast_config_grad_output")
    schemes = (scheme, tokens or scheme, tokens or scheme)
    casts = {n: CastConfig(scaling_granularity=s) for n, s in zip(names, schemes, strict=True)}
    return Float8LinearConfig(**(casts | fields))


CONFIG = config_of(ROW_PAIRS, SINGLE_ROWS)
GATHERED_CONFIG = config_of(ROW_QUADS)
