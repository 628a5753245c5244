"""Plots of captured casts.

This module needs matplotlib, so the library imports it only when a plot is requested.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fp8_dist.debug.captured_cast import CapturedCast, Float8Range, Histogram, histogram
from fp8_dist.dtypes import short_name

_KEPT, _TO_ZERO, _SATURATED = "#3b75af", "#d1495b", "#edae49"
_NORMAL, _SUBNORMAL = "#e3efdf", "#f7efce"
_COLORS = {
    "kept": _KEPT,
    "becomes zero": _TO_ZERO,
    "saturates": _SATURATED,
    "normal range of float8": _NORMAL,
    "subnormal range": _SUBNORMAL,
}
_EDGE: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5, "zorder": 2}


def draw(casts: Sequence[CapturedCast], path: Path) -> None:
    """Draw casts into one figure, one below the other."""
    figure = Figure(figsize=(11, 4.2 * len(casts)), layout="constrained")
    FigureCanvasAgg(figure)
    for cast, axes in zip(casts, figure.subplots(len(casts), squeeze=False)[:, 0], strict=True):
        _draw(cast, histogram(cast), axes)
    patches = [Patch(color=color, label=text) for text, color in _COLORS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _draw(cast: CapturedCast, counts: Histogram, axes: Axes) -> None:
    stats = cast.stats()
    axes.set_title(
        f"{cast.fqn}: {cast.operand} for {', '.join(cast.gemms)}   "
        f"(step {cast.step}, rank {cast.rank}, call {cast.call})",
        loc="left",
        fontsize=11,
        pad=22,
    )
    numbers = f"SQNR {stats.sqnr:.2f} dB, underflow {stats.underflow:.3g} %, "
    numbers += f"saturation {stats.saturation:.3g} %, non-finite {stats.nonfinite:.3g} %"
    kind = "delayed" if cast.delayed else "dynamic"
    numbers += f"; {short_name(cast.qdata.dtype)}, one {kind} scale per {cast.granularity}"
    axes.text(0, 1.02, numbers, transform=axes.transAxes, fontsize=9, color="#444444")
    of = f"value / scale of its {cast.granularity}" if counts.relative else "value"
    axes.set_xlabel(f"magnitude: |{of}|")
    axes.set_ylabel("% of the non-zero values")
    if not counts.values:
        axes.text(0.5, 0.5, "no finite value but zeros", transform=axes.transAxes, ha="center")
        return
    exponents = [octave.exponent for octave in counts.octaves]
    heights = [100 * octave.values / counts.values for octave in counts.octaves]
    smallest = min(height for height in heights if height)
    floor = smallest / 3
    # Parts of a bar can't be stacked on a logarithmic axis, so the width of each shows its share.
    for octave, height in zip(counts.octaves, heights, strict=True):
        left = float(octave.exponent)
        parts = ((octave.to_zero, _TO_ZERO), (octave.kept, _KEPT), (octave.saturated, _SATURATED))
        for number, color in parts:
            if number:
                width = number / octave.values
                axes.bar(left, height - floor, width, floor, align="edge", color=color, **_EDGE)
                left += width
    axes.set_yscale("log")
    axes.set_ylim(floor, max(heights) * 2.2)
    low, high = float(min(exponents)), max(exponents) + 1.0
    if counts.range is not None:
        low, high = _draw_range(counts.range, axes, low, high)
    axes.set_xlim(low - 0.5, high + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"$2^{{{x:.0f}}}$"))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_range(limits: Float8Range, axes: Axes, low: float, high: float) -> tuple[float, float]:
    """Draw the range of float8 behind the bars, and return the limits that the axis must show."""
    largest, normal, subnormal, zero = (
        math.log2(value) for value in (limits.largest, limits.normal, limits.subnormal, limits.zero)
    )
    axes.axvspan(normal, largest, color=_NORMAL, zorder=0)
    axes.axvspan(zero, normal, color=_SUBNORMAL, zorder=0)
    names = {
        largest: f"largest: {limits.largest:.3g}",
        normal: f"smallest normal: {limits.normal:.3g}",
        subnormal: f"smallest subnormal: {limits.subnormal:.3g}",
    }
    for where, name in names.items():
        axes.axvline(where, color="#555555", linewidth=0.9, linestyle=(0, (4, 3)), zorder=3)
        axes.annotate(
            name,
            (where, 0.97),
            (3, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            rotation=90,
            va="top",
            fontsize=8,
            color="#333333",
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "alpha": 0.8, "lw": 0},
            zorder=4,
        )
    return min(low, zero - 1), max(high, largest + 1)
