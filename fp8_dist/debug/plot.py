"""Plots of captured casts.

This module needs matplotlib, so the library imports it only when a plot is requested.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fp8_dist.debug.capturing import CapturedCast
from fp8_dist.debug.histogram import facts, histogram

_COLORS = {
    "kept": "#3b75af",
    "becomes zero": "#d1495b",
    "saturates": "#edae49",
    "normal range of float8": "#e3efdf",
    "subnormal range": "#f7efce",
}
_KEPT, _TO_ZERO, _SATURATED, _NORMAL, _SUBNORMAL = _COLORS.values()


def draw(casts: Sequence[CapturedCast], path: Path) -> None:
    """Draw casts into one figure, one below the other."""
    figure = Figure(figsize=(11, 5.2 * len(casts)), layout="constrained")
    FigureCanvasAgg(figure)
    for cast, axes in zip(casts, figure.subplots(len(casts), squeeze=False)[:, 0], strict=True):
        _draw(cast, axes)
    patches = [Patch(color=color, label=text) for text, color in _COLORS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _draw(cast: CapturedCast, axes: Axes) -> None:
    counts = histogram(cast)
    axes.set_title("\n".join(facts(cast)), loc="left", fontsize=8, family="monospace")
    axes.set_xlabel(f"magnitude {counts.unit}")
    axes.set_ylabel("% of the non-zero values")
    if not counts.values:
        axes.text(0.5, 0.5, "no finite value but zeros", transform=axes.transAxes, ha="center")
        return
    heights = [100 * octave.values / counts.values for octave in counts.octaves]
    floor = min(height for height in heights if height) / 3
    # Parts of a bar can't be stacked on a logarithmic axis, so the width of each shows its share.
    for octave, height in zip(counts.octaves, heights, strict=True):
        left = float(octave.exponent)
        parts = ((octave.to_zero, _TO_ZERO), (octave.kept, _KEPT), (octave.saturated, _SATURATED))
        for number, color in parts:
            if number:
                width = number / octave.values
                axes.bar(left, height - floor, width, floor, align="edge", color=color, zorder=2)
                left += width
    axes.set_yscale("log")
    axes.set_ylim(floor, max(heights) * 2.2)
    if counts.range is not None:
        largest, normal, zero = (
            math.log2(n) for n in (counts.range.largest, counts.range.normal, counts.range.zero)
        )
        axes.axvspan(normal, largest, color=_NORMAL, zorder=0)
        axes.axvspan(zero, normal, color=_SUBNORMAL, zorder=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"$2^{{{x:.0f}}}$"))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6, zorder=0)
