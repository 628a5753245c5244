"""Anomalies in the statistics of a step."""

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
    """Limits beyond which statistics are anomalous; ``None``: no limit.

    Non-finite values are always anomalous.

    Attributes:
        underflow: the largest share of the non-zero values that may become zero, in per cent.
        sqnr: the lowest SQNR, in dB.
        lag: the number of octaves by which the amax may exceed the one that a DELAYED scale was
            made for.
        jump: the number of octaves by which the amax may exceed the largest one of the operand's
            last 16 recorded steps.

    Raises:
        TypeError: a limit is not a number.
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
    """Anomaly in the statistics of a layer.

    Attributes:
        what: ``"non-finite"``, ``"jump"``, ``"underflow"``, ``"SQNR"`` or ``"lag"``.
        value: the measured value, in per cent, dB or octaves.
        limit: the limit that it violates, in the same unit.
        row: the statistics that show it, with the layer, the operand and the step.
        rank: the first rank with a value that is not finite; None: the anomaly is one of all ranks
            together.
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
    """Return an anomaly as plain Python values; ``ranks`` is empty if it is one of all ranks."""
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
    """Yield the anomalies of a row, causes before effects.

    ``usual`` is the largest amax of the same cast in earlier steps, or 0 if there is none.
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
