"""The rows that ``float8_stats`` reports, as data and as text, and their anomalies."""

import dataclasses
import json
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from fp8_dist.debug.measures import Measures
from fp8_dist.device import short_name
from fp8_dist.kernels.e2m1 import E2M1_X2
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import Scheme
from fp8_dist.text import aligned, alike

RECENT = 16  # the number of recorded steps with whose amaxes the next step is compared

What = Literal["non-finite", "jump", "underflow", "SQNR", "lag"]  # the kind of an anomaly


@dataclasses.dataclass(frozen=True)
class CastStats:
    """Statistics of one cast of a layer's operand in one step, over all micro-batches and ranks.

    Shares are percentages of the values that are not zero in high precision.

    Attributes:
        step: the number of the step.
        fqn: the layer; the weight, such as ``layers.0.experts.down_proj``, for experts.
        operand: ``"input"``, ``"weight"`` or ``"grad_output"``.
        gemms: the GEMMs that multiply this float8 copy: ``"output"``, ``"grad_input"``,
            ``"grad_weight"``.
        granularity: what one scale covers, such as ``"tensor"``, ``"row"`` or ``"column"``.
        dtype: the dtype of the float8 data.
        amax: the largest magnitude that was cast; NaN if there was a NaN.
        scale: the largest dequantization scale.
        scale_min: the smallest dequantization scale.
        underflow: the share of values that become zero in float8.
        saturation: the share of values beyond the range of float8 at their scale. It is 0 for a
            dynamic scale, except with the scale rule ``"floor"`` of blocks.
        nonfinite: the share of values that are NaN or infinite in high precision.
        sqnr: the SQNR in dB, ``10 log10(sum x^2 / sum (float8 * scale - x)^2)``. It is infinite for
            a cast that changes nothing, and NaN if there are values that are not finite.
        delayed: whether the scale is computed from the amaxes of earlier steps.
        folded: the operand whose scales multiply this one before it is cast, as in the recipe
            ``rowwise_folded``; the other fields describe the product. None if there is none.
        nonfinite_rank: the first rank with a value that is not finite; None if there is none.
        position: the position of the cast among the casts and GEMMs of the step, in the order in
            which they run. If ranks or micro-batches differ, it is the first position. Comparisons
            of rows ignore it.
    """

    step: int
    fqn: str
    operand: Operand
    gemms: tuple[Gemm, ...]
    granularity: str
    dtype: torch.dtype
    amax: float
    scale: float
    scale_min: float
    underflow: float
    saturation: float
    nonfinite: float
    sqnr: float
    delayed: bool
    folded: Operand | None
    nonfinite_rank: int | None
    position: int = dataclasses.field(default=0, compare=False)

    @staticmethod
    def of(m: Measures, scheme: Scheme, **cast: Any) -> "CastStats":
        """Make statistics of measures. ``cast`` has the fields that measures don't determine."""
        percent = 100 / m.values if m.values else 0.0
        return CastStats(
            **cast,
            granularity=scheme.covers,
            dtype=scheme.packed_dtype or scheme.dtype,
            amax=m.amax,
            scale=m.scale,
            scale_min=-m.minus_scale,
            # With a NaN scale, zeros become NaN in float8, which makes the count negative.
            underflow=max(0.0, percent * m.underflow),
            saturation=percent * m.saturated,
            nonfinite=percent * m.nonfinite,
            sqnr=decibels(m.signal, m.noise),
            nonfinite_rank=int(-m.minus_rank) if m.nonfinite else None,
            position=int(-m.minus_position) if m.minus_position > -math.inf else 0,
        )


@dataclasses.dataclass(frozen=True)
class GemmStats:
    """Statistics of one of a layer's GEMMs in one step, over all micro-batches and ranks.

    Attributes:
        step, fqn, position: as in :class:`CastStats`.
        gemm: ``"output"``, ``"grad_input"`` or ``"grad_weight"``.
        sqnr: the SQNR of the result in dB, relative to the product of the operands in high
            precision.
    """

    step: int
    fqn: str
    gemm: Gemm
    sqnr: float
    position: int = dataclasses.field(default=0, compare=False)


def product(operand: str, folded: str | None) -> str:
    """Return the name of an operand, and of the operand whose scales are folded into it, if any."""
    return operand if folded is None else f"{operand} times the scales of {folded}"


def decibels(signal: float, noise: float) -> float:
    """Return the signal-to-noise ratio of two sums of squares, in dB."""
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


Row = CastStats | GemmStats


def as_dict(row: Row) -> dict[str, Any]:
    """Return a row as plain Python values, with its ``kind``: ``"cast"`` or ``"gemm"``."""
    values = {"kind": "cast" if isinstance(row, CastStats) else "gemm", **dataclasses.asdict(row)}
    if isinstance(row, CastStats):
        values |= {"gemms": list(row.gemms), "dtype": short_name(row.dtype)}
    return values


def append_jsonl(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Append rows to a file, one JSON object per line, with NaN and infinities as strings."""
    with path.open("a") as stream:
        for row in rows:
            texts = {
                name: json.dumps(value)
                for name, value in row.items()
                if isinstance(value, float) and not math.isfinite(value)
            }
            stream.write(json.dumps(row | texts, allow_nan=False) + "\n")


_HEADER = [
    "step",
    "layer",
    "operand",
    "for",
    "amax",
    "scale",
    "underflow",
    "saturation",
    "non-finite",
    "SQNR",
]


def table(rows: Iterable[Row]) -> str:
    """Return rows as text."""
    lines = [_HEADER]
    for row in rows:
        if isinstance(row, CastStats):
            cells = [row.operand, ", ".join(row.gemms), f"{row.amax:.4g}", f"{row.scale:.4g}"]
            cells += [f"{s:.4g} %" for s in (row.underflow, row.saturation, row.nonfinite)]
        else:
            cells = ["", row.gemm, "", "", "", "", ""]
        lines.append([str(row.step), row.fqn, *cells, f"{row.sqnr:.2f} dB"])
    return aligned(lines, right=(0, 4, 5, 6, 7, 8, 9)) if len(lines) > 1 else "no casts"


@dataclasses.dataclass(frozen=True)
class AnomalyLimits:
    """Limits beyond which statistics are anomalous; ``None`` means no limit.

    Non-finite values are always anomalous.

    Attributes:
        underflow: the largest percentage of the non-zero values that may become zero.
        sqnr: the lowest SQNR in dB. For casts to four bits, the limit is 12 dB lower.
        lag: the number of octaves by which the amax may exceed the amax for which a DELAYED scale
            was computed. A cast that saturates for this reason is not judged by its SQNR.
        jump: the number of octaves by which the amax may exceed the largest amax of the same cast
            in the last ``RECENT`` (16) recorded steps.

    Raises:
        TypeError: a limit is not a number.
        ValueError: a limit is NaN, or a limit other than ``sqnr`` is negative.
    """

    underflow: float | None = 50.0
    sqnr: float | None = 15.0
    lag: float | None = 5.0
    jump: float | None = 7.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                raise TypeError(f"AnomalyLimits: {name}={value!r} must be a number or None (never)")
            if value is not None and (math.isnan(value) or (value < 0 and name != "sqnr")):
                raise ValueError(
                    f"AnomalyLimits: {name}={value!r} is no limit; give a number"
                    f"{'' if name == 'sqnr' else ' that is not negative'}, or None (never)"
                )


@dataclasses.dataclass(frozen=True)
class Anomaly:
    """An anomaly in the statistics of a layer.

    Attributes:
        what: ``"non-finite"``, ``"jump"``, ``"underflow"``, ``"SQNR"`` or ``"lag"``.
        value: the measured value, a percentage or a number of dB or octaves.
        limit: the limit that the value violates, in the same unit.
        row: the statistics that show the anomaly, with the layer, the operand and the step.
        rank: the first rank with a value that is not finite. It is None for other kinds of
            anomalies, which only the combined statistics of all ranks show.
    """

    what: What
    value: float
    limit: float
    row: Row
    rank: int | None = None

    def __str__(self) -> str:
        row, value, limit = self.row, f"{self.value:.4g}", f"{self.limit:g}"
        if isinstance(row, CastStats):
            gemms = f" (for {', '.join(row.gemms)})" if row.gemms else ""
            place = product(row.operand, row.folded) + gemms
        else:
            place = f"the GEMM of {row.gemm}"
        text = {
            "non-finite": f"{value} % of the values are NaN or infinite, first on rank {self.rank}",
            "jump": f"the amax is {value} octaves above the largest of the last steps (limit: "
            f"{limit})",
            "underflow": f"{value} % of the values become zero in float8 (limit: {limit} %)",
            "SQNR": f"an SQNR of {value} dB (limit: {limit} dB)",
            "lag": f"the amax is {value} octaves above what the delayed scale was made for (limit: "
            f"{limit}): values saturate until the history has caught up",
        }[self.what]
        return f"step {row.step}: {row.fqn}: {place}: {text}"


def summarized(anomalies: Sequence[Anomaly]) -> str:
    """Describe the first of several anomalies, and count the others by kind and layer.

    Layers whose names differ in numbers alone are one group, with ``*`` in place of the numbers.
    """
    first, *others = anomalies
    if not others:
        return str(first)
    kinds = defaultdict[str, list[str]](list)
    for name, group in alike(others, lambda anomaly: (anomaly.row.fqn, anomaly.what)):
        kinds[group[0].what].append(name)
    then = "; ".join(f"{what} in {', '.join(names)}" for what, names in kinds.items())
    return f"{first}. Then {len(others)} more: {then}"


def anomaly_dict(anomaly: Anomaly) -> dict[str, Any]:
    """Return an anomaly as plain Python values. ``ranks`` is empty without a rank."""
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


class FirstAnomalies:
    """Filter that yields the first anomaly of each kind in each layer."""

    def __init__(self, limits: AnomalyLimits) -> None:
        self._limits = limits
        self._known: set[tuple[str, str]] = set()
        # The finite amaxes of each cast in the last recorded steps, by layer, operand and GEMMs.
        self._amaxes = defaultdict[tuple[str, ...], deque[float]](partial(deque, maxlen=RECENT))

    def of(self, row: Row) -> Iterator[Anomaly]:
        """Yield the first anomalies in the next row. Call this in the order of the casts."""
        for anomaly in self._all(row):
            key = row.fqn, anomaly.what
            if key not in self._known:
                self._known.add(key)
                yield anomaly

    def _all(self, row: Row) -> Iterator[Anomaly]:
        limits = self._limits
        if isinstance(row, CastStats):
            amaxes = self._amaxes[row.fqn, row.operand, *row.gemms]
            usual = max(amaxes, default=0.0)
            if math.isfinite(row.amax):
                amaxes.append(row.amax)
            if row.nonfinite:
                yield Anomaly("non-finite", row.nonfinite, 0.0, row, row.nonfinite_rank)
            if limits.jump is not None and 0 < usual * 2**limits.jump < row.amax < math.inf:
                yield Anomaly("jump", math.log2(row.amax / usual), limits.jump, row)
            if limits.underflow is not None and row.underflow > limits.underflow:
                yield Anomaly("underflow", row.underflow, limits.underflow, row)
            largest = row.scale * torch.finfo(row.dtype).max if row.delayed else math.inf
            if limits.lag is not None and largest < row.amax < math.inf:
                if largest * 2**limits.lag < row.amax:
                    yield Anomaly("lag", math.log2(row.amax / largest), limits.lag, row)
                return  # values that saturate lower the SQNR
        # E2M1 has two mantissa bits fewer than e4m3.
        less = 12.0 if isinstance(row, CastStats) and row.dtype is E2M1_X2 else 0.0
        if limits.sqnr is not None and row.sqnr < limits.sqnr - less:
            yield Anomaly("SQNR", row.sqnr, limits.sqnr - less, row)
