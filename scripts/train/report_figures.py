"""The pictures of a report: metrics over steps, and heat maps of layers x steps."""

import base64
import io
import math
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from scripts.train.report_data import Row, Run

Array = npt.NDArray[np.float64]

BAD, EMPTY = "#d1247f", "#e9ecf0"
MAX_TICKS = 12
# Of each metric: its title, what it is multiplied by, and the scale of its axis.
LINES = {
    "loss": ("loss, nats per byte", 1.0, "linear"),
    "learning_rate": ("learning rate", 1.0, "linear"),
    "tokens_per_second": ("tokens/s", 1.0, "linear"),
    "memory_bytes": ("memory, GiB", 2.0**-30, "linear"),
    "grad_norm": ("norm of the gradients, before clipping", 1.0, "log"),
}
HEATS = {
    "amax": "log2 of the amax: the largest absolute value",
    "underflow": "% of non-zero elements that became zero in float8",
    "saturation": "% of elements that were clamped to the largest",
    "sqnr": "SQNR in dB: signal to quantization noise",
}


def charts(run: Run) -> list[str]:
    """A picture of each metric that the run has."""
    metrics = [metric for metric in LINES if any(metric in row for row in run.metrics)]
    with mpl.rc_context({"svg.fonttype": "none"}):
        return [line_chart(run, metric) for metric in metrics]


def heat_maps(run: Run) -> dict[str, list[str]]:
    """Pictures of each measure, by what was measured, such as an operand."""
    by_label: dict[str, list[Row]] = {}
    for row in run.stats or []:
        by_label.setdefault(row["label"], []).append(row)
    # Names of layers are text as it is, "$" included.
    with mpl.rc_context({"svg.fonttype": "none", "text.parse_math": False}):
        return {
            label: [heat_map(rows, measure) for measure in HEATS if measure in rows[0]]
            for label, rows in by_label.items()
        }


def line_chart(run: Run, metric: str) -> str:
    """A metric over steps, with a gap where it is not finite; anomalies are dotted lines."""
    title, factor, scale = LINES[metric]
    rows = [row for row in run.metrics if metric in row]
    values = [factor * row[metric] if math.isfinite(row[metric]) else math.nan for row in rows]
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["step"] for row in rows], values, marker="." if len(rows) <= 30 else "")
    for step in sorted({row["step"] for row in run.anomalies or []})[:20]:
        axes.axvline(step, color=BAD, linewidth=1, linestyle=":")
    axes.set(title=title, xlabel="step", yscale=scale)
    return picture(figure)


def heat_map(rows: Sequence[Row], measure: str) -> str:
    """Layers x steps of a measure of one kind of rows, and the cells that are not finite."""
    layers, steps, values, bad = grid(rows, measure)
    if measure == "amax":
        values = np.log2(np.where(values > 0, values, np.nan))
    finite = values[np.isfinite(values)]
    low, high = np.percentile(finite, [1, 99]) if finite.size else (0.0, 1.0)
    figure = Figure(figsize=(13, 1.4 + 0.16 * len(layers)), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor(EMPTY)
    colors = "cividis_r" if measure == "sqnr" else "cividis"
    limits = {"vmin": low, "vmax": max(high, low + 1)}
    # (An exact result has an infinite SQNR.)
    shown = np.ma.masked_invalid(np.where(np.isinf(values), np.sign(values) * 1e30, values))
    options = {"aspect": "auto", "interpolation": "nearest"}
    figure.colorbar(axes.imshow(shown, cmap=colors, **limits, **options))
    axes.imshow(np.where(bad, 1.0, np.nan), cmap=ListedColormap([BAD]), **options)
    ticks = range(0, len(steps), -(-len(steps) // MAX_TICKS))
    axes.set_xticks(ticks, [str(steps[tick]) for tick in ticks])
    axes.set_yticks(range(len(layers)), layers, fontsize=7)
    axes.set(title=HEATS[measure], xlabel="step")
    return picture(figure)


def grid(rows: Sequence[Row], measure: str) -> tuple[list[str], list[int], Array, npt.NDArray]:
    """Layers, steps, and of each cell the value and whether it is bad; NaN without a row.

    Of several rows of a cell the worst value counts: the largest, or the smallest SQNR.
    """
    layers = list(dict.fromkeys(row["fqn"] for row in rows))
    steps = sorted({row["step"] for row in rows})
    columns, lines = ({each: i for i, each in enumerate(axis)} for axis in (steps, layers))
    values = np.full((len(layers), len(steps)), np.nan)
    bad = np.zeros(values.shape, bool)
    worst = np.fmin if measure == "sqnr" else np.fmax
    for row in rows:
        cell = lines[row["fqn"]], columns[row["step"]]
        values[cell] = worst(values[cell], row[measure])
        bad[cell] |= not row["finite"]
    return layers, steps, values, bad


def picture(figure: Figure) -> str:
    """An SVG as a data URI: a browser shows it, and runs nothing that its texts may hold."""
    file = io.StringIO()
    figure.savefig(file, format="svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue().encode()).decode()}"
