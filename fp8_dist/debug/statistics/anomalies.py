"""What is worth a warning in the statistics of a step."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fp8_dist.debug.statistics.rows import CastStats, Row

What = Literal["non-finite", "jump", "underflow", "SQNR", "lag"]


@dataclass(frozen=True)
class AnomalyLimits:
    """From where on statistics are anomalous; ``None``: never. (Non-finite values always are.)

    Attributes:
        underflow: more than so many per cent of the non-zero values become zero.
        sqnr: fewer dB than this.
        lag: the amax exceeds what a DELAYED scale was made for by more than so many octaves.
        jump: the amax exceeds the largest one of the operand's last 16 recorded steps by more than
            so many octaves.

    Raises:
        TypeError: a limit is no number.
        ValueError: a limit is NaN, or one other than ``sqnr`` is negative.
    """

    underflow: float | None = 20.0
    sqnr: float | None = 15.0
    lag: float | None = 1.0
    jump: float | None = 7.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"AnomalyLimits: {name}={value!r} must be a number or None (never)")
            if math.isnan(value) or (value < 0 and name != "sqnr"):
                raise ValueError(
                    f"AnomalyLimits: {name}={value!r} is no limit; give a number"
                    f"{'' if name == 'sqnr' else ' that is not negative'}, or None (never)"
                )


@dataclass(frozen=True)
class Anomaly:
    """Something wrong with a layer.

    Attributes:
        what: ``"non-finite"``, ``"jump"``, ``"underflow"``, ``"SQNR"`` or ``"lag"``.
        value: per cent, dB or octaves.
        limit: the one that was exceeded, in the same unit.
        row: the statistics that show it, with the layer, the operand and the step.
        rank: the first rank that met a value that is not finite; None: the anomaly is that of all
            ranks together.
    """

    what: What
    value: float
    limit: float
    row: Row
    rank: int | None = None

    def __str__(self) -> str:
        row, value, limit = self.row, f"{self.value:.4g}", f"{self.limit:g}"
        place = f"the GEMM of {row.gemm}" if not isinstance(row, CastStats) else row.operand
        if isinstance(row, CastStats) and row.gemms:
            place += f" (for {', '.join(row.gemms)})"
        found = {
            "non-finite": f"{value} % of the values are NaN or infinite, first on rank {self.rank}",
            "jump": f"the amax is {value} octaves above the largest of the last steps (limit: "
            f"{limit})",
            "underflow": f"{value} % of the values become zero in float8 (limit: {limit} %)",
            "SQNR": f"an SQNR of {value} dB (limit: {limit} dB)",
            "lag": f"the amax is {value} octaves above what the delayed scale was made for (limit: "
            f"{limit}): values saturate until the history has caught up",
        }[self.what]
        return f"step {row.step}: {row.fqn}: {place}: {found}"


def anomaly_dict(anomaly: Anomaly) -> dict[str, Any]:
    """An anomaly as plain Python values. ``ranks``: those that it is of; none: all together."""
    row = anomaly.row
    return {
        "step": row.step,
        "fqn": row.fqn,
        "operand": row.operand if isinstance(row, CastStats) else f"GEMM of {row.gemm}",
        "what": anomaly.what,
        "value": anomaly.value,
        "threshold": anomaly.limit,
        "ranks": [] if anomaly.rank is None else [anomaly.rank],
        "message": str(anomaly),
    }


def anomalies_of(row: Row, limits: AnomalyLimits, usual: float = 0.0) -> Iterator[Anomaly]:
    """What is anomalous in a row, the cause before what follows from it.

    ``usual`` is the largest amax of the same cast in steps before; 0: there is none.
    """
    if isinstance(row, CastStats):
        if row.nonfinite:
            yield Anomaly("non-finite", row.nonfinite, 0.0, row, row.nonfinite_rank)
        if limits.jump is not None and 0 < usual * 2**limits.jump < row.amax < math.inf:
            yield Anomaly("jump", math.log2(row.amax / usual), limits.jump, row)
        if limits.underflow is not None and row.underflow > limits.underflow:
            yield Anomaly("underflow", row.underflow, limits.underflow, row)
        fits = row.scale * torch.finfo(row.dtype).max
        if limits.lag is not None and row.delayed and fits * 2**limits.lag < row.amax < math.inf:
            yield Anomaly("lag", math.log2(row.amax / fits), limits.lag, row)
    if limits.sqnr is not None and row.sqnr < limits.sqnr:
        yield Anomaly("SQNR", row.sqnr, limits.sqnr, row)
