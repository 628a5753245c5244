"""The pictures of a report: metrics over steps, layers with anomalies, and layers x steps."""

import base64
import io
import math
from collections.abc import Iterator, Sequence
from functools import partial

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fp8_dist.report.data import Row, Run

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

BAD, EMPTY = "#d1247f", "#e9ecf0"
MAX_TICKS = 12
HEATS = {
    "amax": "amax: the largest absolute value",
    "underflow": "underflow: % of non-zero elements that became zero in float8",
    "saturation": "saturation: % of elements that were clamped to the largest",
    "sqnr": "SQNR: signal to quantization noise, dB",
}
_STYLE = {"svg.fonttype": "none", "text.parse_math": False}  # names are text as they are, "$" too


def charts(runs: Sequence[Run]) -> list[list[str]]:
    """Return two pictures of each metric, with a linear and with a logarithmic axis."""
    names = dict.fromkeys(name for run in runs for name in run.metric_names)
    with mpl.rc_context(_STYLE):
        return [[_line_chart(runs, name, log) for log in (False, True)] for name in names]


def layer_chart(run: Run, fqn: str) -> str:
    """Draw the amax and SQNR of a layer's casts over steps, with dotted lines at anomalies."""
    casts: dict[str, list[Row]] = {}
    for row in run.stats or []:
        if row["fqn"] == fqn and "amax" in row:
            casts.setdefault(row["label"], []).append(row)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(13, 3), layout="constrained")
        left, right = figure.subplots(1, 2)
        for axes, measure, title in ((left, "amax", "amax"), (right, "sqnr", "SQNR, dB")):
            for label, rows in casts.items():
                _plot(axes, rows, measure, label)
            _mark(axes, [row for row in run.anomalies if row["fqn"] == fqn])
            axes.set(title=title, xlabel="step")
        _log_scale(left)
        if casts:
            figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", fontsize=8)
        return _picture(figure)


def heat_maps(runs: Sequence[Run]) -> Iterator[tuple[str, list[str], list[tuple[str, list[str]]]]]:
    """Yield the label of each kind of cast, its measures that are zero everywhere, and pictures.

    The pictures are, for each run, its name and one of each other measure, with the same colours in
    all runs.
    """
    by_label: dict[str, dict[str, list[Row]]] = {}
    for run in runs:
        for row in run.stats or []:
            by_label.setdefault(row["label"], {}).setdefault(run.name, []).append(row)
    with mpl.rc_context(_STYLE):
        for label, by_run in by_label.items():
            pictures: dict[str, list[str]] = {name: [] for name in by_run}
            zero = []
            for measure in HEATS:
                grids = {name: grid(rows, measure) for name, rows in by_run.items()}
                values = np.concatenate([g[2][np.isfinite(g[2])] for g in grids.values()])
                if not any(measure in row for rows in by_run.values() for row in rows):
                    continue
                is_share = measure in ("underflow", "saturation")
                if is_share and not values.any():
                    zero.append(measure)
                    continue
                # The colours end at percentiles 1 and 99, at least one unit apart.
                first, last = np.percentile(values, [1, 99]) if values.size else (0.0, 1.0)
                low = 0.0 if is_share else float(first)
                limits = low, float(max(last, low + 1))
                for name, each in grids.items():
                    pictures[name].append(_heat_map(*each, measure, limits))
            yield label, zero, list(pictures.items())


def _line_chart(runs: Sequence[Run], metric: str, log: bool) -> str:
    """Draw a metric over steps, with a gap where it is not finite."""
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.subplots()
    for i, run in enumerate(runs):
        rows = [row for row in run.metrics if metric in row]
        if rows:
            _plot(axes, rows, metric, run.name, f"C{i}")
            _mark(axes, run.anomalies)
    unit = next(filter(None, (run.config.get("units", {}).get(metric) for run in runs)), "")
    axes.set(title=f"{metric}, {unit}" if unit else metric, xlabel="step")
    if log:
        _log_scale(axes)
    if len(runs) > 1:
        axes.legend(fontsize=8)
    return _picture(figure)


def _plot(axes: Axes, rows: Sequence[Row], name: str, label: str, color: str | None = None) -> None:
    values = [row[name] if math.isfinite(row[name]) else math.nan for row in rows]
    marker = "." if len(rows) <= 30 else ""
    steps = [row["step"] for row in rows]
    axes.plot(steps, values, marker=marker, label=label, color=color, linewidth=1.2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _log_scale(axes: Axes) -> None:
    """Make the axis of values logarithmic, with numbers as labels: the default are formulas.

    The axis stays linear if no value is positive.
    """
    if axes.dataLim.minposy == math.inf:
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    digits = "1235" if high < 30 * low else "1"
    shown = FuncFormatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in digits else "")
    axes.yaxis.set_major_formatter(shown)
    axes.yaxis.set_minor_formatter(shown)


def _mark(axes: Axes, anomalies: Sequence[Row]) -> None:
    for step in sorted({row["step"] for row in anomalies})[:20]:
        axes.axvline(step, color=BAD, linewidth=1, linestyle=":")


def grid(rows: Sequence[Row], measure: str) -> tuple[list[str], list[int], Array, Mask]:
    """Return the layers, the steps, the value of each cell, and whether it is bad.

    A cell without a row is NaN. Of several rows of a cell the worst value counts: the largest, or
    the smallest SQNR. Amaxes are octaves.
    """
    layers = list(dict.fromkeys(row["fqn"] for row in rows))
    steps = sorted({row["step"] for row in rows})
    columns, lines = ({each: i for i, each in enumerate(axis)} for axis in (steps, layers))
    values = np.full((len(layers), len(steps)), np.nan)
    bad = np.zeros(values.shape, bool)
    worst = np.fmin if measure == "sqnr" else np.fmax
    for row in rows:
        cell = lines[row["fqn"]], columns[row["step"]]
        values[cell] = worst(values[cell], row.get(measure, math.nan))
        bad[cell] |= not row["finite"]
    if measure == "amax":
        values = np.log2(np.where(values > 0, values, np.nan))
    return layers, steps, values, bad


def _heat_map(
    layers: list[str],
    steps: list[int],
    values: Array,
    bad: Mask,
    measure: str,
    limits: tuple[float, float],
) -> str:
    """Draw layers x steps of a measure of one kind of rows, and the cells that are not finite."""
    figure = Figure(figsize=(13, 1.4 + 0.16 * len(layers)), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor(EMPTY)
    colors = "cividis_r" if measure == "sqnr" else "cividis"
    # (An exact result has an infinite SQNR.)
    shown = np.ma.masked_invalid(np.where(np.isinf(values), np.sign(values) * 1e30, values))
    show = partial(axes.imshow, aspect="auto", interpolation="nearest")
    image = show(shown, cmap=colors, vmin=limits[0], vmax=limits[1])
    bar = figure.colorbar(image, aspect=12, pad=0.01)
    bar.locator = MaxNLocator(4)
    bar.formatter = FuncFormatter(lambda x, _: _number(2.0**x if measure == "amax" else x))
    show(np.where(bad, 1.0, np.nan), cmap=ListedColormap([BAD]))
    ticks = range(0, len(steps), -(-len(steps) // MAX_TICKS))
    axes.set_xticks(ticks, [str(steps[tick]) for tick in ticks])
    axes.set_yticks(range(len(layers)), layers, fontsize=7)
    axes.set(title=HEATS[measure], xlabel="step")
    return _picture(figure)


def _number(x: float) -> str:
    return f"{x:,.0f}" if 100 <= abs(x) < 1e6 else f"{x:.3g}"


def _picture(figure: Figure) -> str:
    """Return an SVG as a data URI: a browser shows it, and runs nothing that its texts may hold."""
    file = io.StringIO()
    figure.savefig(file, format="svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue().encode()).decode()}"
