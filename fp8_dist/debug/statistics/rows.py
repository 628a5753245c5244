"""Rows that ``float8_stats`` reports, as data and as text."""

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fp8_dist.config import Gemm, Operand
from fp8_dist.debug.statistics.measuring import Measures
from fp8_dist.dtypes import short_name
from fp8_dist.scaling import Scheme


@dataclasses.dataclass(frozen=True)
class CastStats:
    """Statistics of one cast of a layer's operand in one step, over all micro-batches and ranks.

    Shares are in per cent of the values that are not zero in high precision.

    Attributes:
        step: the number of the step.
        fqn: the layer.
        operand: ``"input"``, ``"weight"`` or ``"grad_output"``.
        gemms: the GEMMs that multiply this float8 copy: ``"output"``, ``"grad_input"``,
            ``"grad_weight"``.
        granularity: what one scale covers, such as ``"tensor"``, ``"row"`` or ``"column"``.
        dtype: the dtype of the float8 data.
        amax: the largest magnitude that was cast; NaN if there was a NaN.
        scale: the largest dequantization scale.
        scale_min: the smallest one.
        underflow: share that is zero in float8.
        saturation: share beyond the range of float8 at the given scale. It is 0 for a dynamic
            scale, except by the block rule *floor*.
        nonfinite: share of NaN and infinity, in high precision.
        sqnr: dB, ``10 log10(sum x^2 / sum (float8 * scale - x)^2)``; infinite for a cast that
            changes nothing, NaN for one with values that are not finite.
        delayed: whether the scale follows from the amaxes of earlier steps.
        nonfinite_rank: the first rank with a value that is not finite; None if there is none.
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
    nonfinite_rank: int | None

    @staticmethod
    def of(
        m: Measures,
        step: int,
        fqn: str,
        operand: Operand,
        gemms: tuple[Gemm, ...],
        scheme: Scheme,
        delayed: bool,
    ) -> "CastStats":
        """Return the statistics that follow from the measures of a cast."""
        percent = 100 / m.values if m.values else 0.0
        return CastStats(
            step=step,
            fqn=fqn,
            operand=operand,
            gemms=gemms,
            granularity=scheme.covers,
            dtype=scheme.dtype,
            amax=m.amax,
            scale=m.scale,
            scale_min=-m.minus_scale,
            # The count is negative where the scale is NaN: zeros become NaN in float8.
            underflow=max(0.0, percent * m.underflow),
            saturation=percent * m.saturated,
            nonfinite=percent * m.nonfinite,
            sqnr=decibels(m.signal, m.noise),
            delayed=delayed,
            nonfinite_rank=int(-m.minus_rank) if m.nonfinite else None,
        )


@dataclasses.dataclass(frozen=True)
class GemmStats:
    """Statistics of one of a layer's GEMMs in one step, over all micro-batches and ranks.

    Attributes:
        step, fqn: as in :class:`CastStats`.
        gemm: ``"output"``, ``"grad_input"`` or ``"grad_weight"``.
        sqnr: SQNR in dB of the result, relative to the product of the operands in high precision.
    """

    step: int
    fqn: str
    gemm: Gemm
    sqnr: float


def decibels(signal: float, noise: float) -> float:
    """Return the signal-to-noise ratio of two sums of squares in dB."""
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
        stream.writelines(json.dumps(_strict(row), allow_nan=False) + "\n" for row in rows)


def _strict(row: dict[str, Any]) -> dict[str, Any]:
    names = {math.inf: "Infinity", -math.inf: "-Infinity"}
    return {
        key: names.get(value, "NaN")
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in row.items()
    }


def table(rows: Iterable[Row]) -> str:
    """Return rows as text."""
    lines = [["step", "layer", "operand", "for", "amax", "scale", "underflow", "saturation"]]
    lines[0] += ["non-finite", "SQNR"]
    for row in rows:
        if isinstance(row, CastStats):
            numbers = [f"{row.amax:.4g}", f"{row.scale:.4g}"]
            numbers += [f"{s:.4g} %" for s in (row.underflow, row.saturation, row.nonfinite)]
            what = [row.operand, ", ".join(row.gemms)]
        else:
            numbers, what = [""] * 5, ["", row.gemm]
        lines.append([str(row.step), row.fqn, *what, *numbers, f"{row.sqnr:.2f} dB"])
    if len(lines) == 1:
        return "no casts"
    align = [str.rjust] + [str.ljust] * 3 + [str.rjust] * 6
    columns = [
        [pad(cell, max(map(len, column))) for cell in column]
        for pad, column in zip(align, zip(*lines, strict=True), strict=True)
    ]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))
