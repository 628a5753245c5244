"""Pictures of a report: metrics over steps, layers with anomalies, and maps of layers x steps."""

import base64
import io
import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, product
from operator import attrgetter
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator

from fp8_dist.debug import AnomalyLimits
from fp8_dist.debug.rows import RECENT
from fp8_dist.report import units
from fp8_dist.report.data import LAST_STEPS, JsonRow, Run, differences
from fp8_dist.report.writer import LIMITS
from fp8_dist.text import progress

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Ends = tuple[float, float]

BAD = "#d1247f"
MAX_TICKS = 12
MAX_BAR = 18  # the number of rows of a map as tall as the largest bar of colours
LOUD = 0.75  # a part of the limit; jumps in healthy training of a small Llama reached 0.74
QUIET = 0.02  # a part of the limit, of which colours show nothing
# The page inverts lightness in dark mode, so both ends differ from white and from black.
COLORS = LinearSegmentedColormap.from_list(
    "quiet to loud", [(0, "#9cc3dc"), (0.5, "#cdbb7c"), (LOUD, "#eda94a"), (1, "#7d2508")]
)
EMPTY = "#a3abb5"  # lines across cells that were not recorded
HEATS = {
    "amax": f"amax: octaves above the largest of the last {RECENT} recorded steps",
    "underflow": "underflow: % of non-zero elements that became zero in float8",
    "saturation": "saturation: % of elements that were clamped to the largest",
    "sqnr": "SQNR: signal to quantization noise, dB",
}
Captioned = tuple[str, str]  # the text above a picture, and the picture
CHART = (3.6, 2.2)  # inches: four charts beside each other on a page of 1,280 pixels
MAP_WIDTH = 7.2  # two maps, also on one of 1,920
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "text.parse_math": False,  # show names literally, even with "$"
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


class Grid(NamedTuple):
    """A measure of the casts of one kind, by layer and step.

    Attributes:
        layers: the layers, one for each row.
        steps: the steps, one for each column.
        values: the worst value of each cell; NaN if there is none.
        bad: the cells with a cast that is not finite.
    """

    layers: list[str]
    steps: list[int]
    values: Array
    bad: Mask


class _Map(NamedTuple):
    """A grid of a run, and how it is colored.

    Attributes:
        label: the kind of cast.
        ends: the values at both ends of the colors. The second one is where anomalies begin.
        part: the values, scaled so that the first of ``ends`` is 0 and the second is 1.
    """

    label: str
    run: Run
    measure: str
    grid: Grid
    ends: Ends
    part: Array


class WorstLayer(NamedTuple):
    """The worst cast of a layer.

    Attributes:
        part: the part of the limit; infinity if it is not finite, -infinity if there is no value.
        value: the value of the measure, of which ``limit`` is the limit.
    """

    part: float
    step: int
    run: str
    layer: str
    cast: str
    measure: str
    value: float
    limit: float

    @property
    def order(self) -> tuple[float, int]:
        """The order from the farthest from a limit to the nearest, and first, one."""
        return self.part, -self.step


def charts(runs: Sequence[Run]) -> list[Captioned]:
    """Draw the loss minus that of the first run, if runs can be compared, and each metric.

    Charts have no legends, which would cover curves: :func:`color` has the colors of runs.
    """
    names = dict.fromkeys(name for run in runs for name in run.metric_names)
    with mpl.rc_context(_STYLE):
        return [*_difference_chart(runs), *[_line_chart(runs, name) for name in names]]


def color(index: int) -> str:
    """Return the color of a run's curves, by its place among the runs."""
    return to_hex(f"C{index}")


def layer_chart(run: Run, fqn: str) -> str:
    """Draw the amax and SQNR of a layer's casts over steps, with dotted lines at anomalies."""
    progress(f"drawing {fqn}")
    rows = [row for row in run.stats if row["fqn"] == fqn and "amax" in row]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(13, 3), layout="constrained")
        left, right = figure.subplots(1, 2)
        for axes, measure, title in ((left, "amax", "amax"), (right, "sqnr", "SQNR, dB")):
            for label in dict.fromkeys(row["label"] for row in rows):
                own = [row for row in rows if row["label"] == label]
                _plot(axes, [(row["step"], row[measure]) for row in own], label)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            _mark(axes, [row for row in run.anomalies if row["fqn"] == fqn])
            axes.set(title=title, xlabel="step")
        if left.dataLim.minposy < math.inf:
            left.set_yscale("log")
            left.yaxis.set_major_formatter(LogFormatter())  # the default writes TeX
            left.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
        if rows:
            figure.legend(*left.get_legend_handles_labels(), loc="outside lower left")
        return _picture(figure)


def worst_layers(runs: Sequence[Run]) -> list[WorstLayer]:
    """Return the layers of all runs, the nearest to a limit first, each with its worst cast."""
    found: dict[tuple[str, str], WorstLayer] = {}
    for each in _maps(runs):
        part = np.where(np.isnan(each.part), -np.inf, each.part)
        part[each.grid.bad] = np.inf
        for i, layer in enumerate(each.grid.layers):
            j = int(part[i].argmax())
            worst = WorstLayer(
                part=part[i, j],
                step=each.grid.steps[j],
                run=each.run.name,
                layer=layer,
                cast=each.label,
                measure=each.measure,
                value=each.grid.values[i, j],
                limit=each.ends[1],
            )
            known = found.setdefault((worst.run, layer), worst)
            if worst.order > known.order:
                found[worst.run, layer] = worst
    return sorted(found.values(), key=attrgetter("order"), reverse=True)


def heat_maps(runs: Sequence[Run]) -> Iterator[tuple[str, list[Captioned], bool]]:
    """Yield each kind of cast, its heat maps, and whether a cell of them is nearly anomalous.

    There is a map for each measure and run, except for those whose cells are all quiet. All maps of
    SQNRs are drawn.
    """
    for label, maps in groupby(_maps(runs), attrgetter("label")):
        progress(f"drawing all layers: {label}")
        pictures: list[Captioned] = []
        is_loud = False
        for each in maps:
            largest = np.fmax.reduce(each.part, axis=None, initial=0.0)
            is_loud |= bool(largest >= LOUD or each.grid.bad.any())
            if largest > QUIET or each.measure == "sqnr":
                caption = HEATS[each.measure]
                if len(runs) > 1:
                    caption = f"{each.run.name}: {caption}"
                pictures.append((caption, _heat_map(each)))
        yield label, pictures, is_loud


def _maps(runs: Sequence[Run]) -> Iterator[_Map]:
    """Yield the map of each kind of cast, measure and run."""
    labels = dict.fromkeys(row["label"] for run in runs for row in run.stats)
    for label, measure, run in product(labels, HEATS, runs):
        rows = [row for row in run.stats if row["label"] == label]
        if any(measure in row for row in rows):
            cells = grid(rows, measure)
            begin, end = colored(measure, run.config[LIMITS])
            part = (cells.values - begin) / (end - begin)
            yield _Map(label, run, measure, cells, (begin, end), part)


def colored(measure: str, limits: AnomalyLimits) -> Ends:
    """Return the values at both ends of the colours. The second one is where anomalies begin.

    A measure without a limit takes the default limit, and saturation the limit of underflow.
    """
    name = {"amax": "jump", "saturation": "underflow"}.get(measure, measure)
    value: float | None = getattr(limits, name)
    limit = float(getattr(AnomalyLimits(), name) if value is None else value)
    return (limit + 15, limit) if measure == "sqnr" else (0.0, limit or 1e-9)


def _difference_chart(runs: Sequence[Run]) -> list[Captioned]:
    """Draw the loss minus the first run's, and running medians; nothing without common steps."""
    figure, axes = _chart()
    axes.axhline(0, color=color(0), linewidth=1.2)
    for i, run in enumerate(runs[1:], 1):
        by_step = differences(run, runs[0])
        steps, values = list(by_step), np.array([*by_step.values()])
        middle = [np.median(values[max(0, j - LAST_STEPS) : j]) for j in range(1, len(values) + 1)]
        axes.plot(steps, values, color=color(i), linewidth=0.7, alpha=0.7)
        axes.plot(steps, middle, color=color(i), linewidth=1.6)
    if not any(np.size(line.get_xdata()) for line in axes.lines[1:]):
        return []
    baseline = runs[0].name
    caption = f"loss minus {baseline}'s (bold: median of the last {LAST_STEPS} steps)"
    return [(caption, _picture(figure))]


def _line_chart(runs: Sequence[Run], metric: str) -> Captioned:
    """Draw a metric over steps, with a gap where it is not finite."""
    figure, axes = _chart()
    shown = units.shown(metric, runs)
    for i, run in enumerate(runs):
        rows = [row for row in run.metrics if metric in row]
        if rows:
            points = [(row["step"], row[metric] / shown.divisor) for row in rows]
            _plot(axes, points, run.name, color(i))
            _mark(axes, run.anomalies)
    return shown.label, _picture(figure)


def _chart() -> tuple[Figure, Axes]:
    """Return an empty chart over steps."""
    figure = Figure(figsize=CHART, layout="constrained")
    axes = figure.subplots()
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: units.tick(x)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: units.tick(x)))
    axes.grid(axis="y", color=EMPTY, alpha=0.3, linewidth=0.6)
    axes.margins(x=0.02)
    axes.set_xlabel("step")
    return figure, axes


def _plot(
    axes: Axes, points: Sequence[tuple[int, float]], label: str, color: str | None = None
) -> None:
    steps = [step for step, _ in points]
    values = [value if math.isfinite(value) else math.nan for _, value in points]
    marker = "." if len(points) <= 30 else ""
    axes.plot(steps, values, marker=marker, label=label, color=color, linewidth=1.2)
    axes.update_datalim([(steps[0], 0), (steps[-1], 0)], updatey=False)  # also if they are NaN


def _mark(axes: Axes, anomalies: Sequence[JsonRow]) -> None:
    for step in sorted({row["step"] for row in anomalies})[:20]:
        axes.axvline(step, color=BAD, linewidth=1, linestyle=":")


def grid(rows: Sequence[JsonRow], measure: str) -> Grid:
    """Return a measure by layer and step.

    A cell without a row is NaN. A cell with several rows has their worst value: the smallest SQNR,
    otherwise the largest. Amaxes are in octaves above the largest recent one, or 0 without one.
    """
    layers = list(dict.fromkeys(row["fqn"] for row in rows))
    steps = sorted({row["step"] for row in rows})
    columns = {step: i for i, step in enumerate(steps)}
    lines = {fqn: i for i, fqn in enumerate(layers)}
    values = np.full((len(layers), len(steps)), np.nan)
    bad = np.zeros(values.shape, bool)
    worst = np.fmin if measure == "sqnr" else np.fmax
    for row in rows:
        cell = lines[row["fqn"]], columns[row["step"]]
        values[cell] = worst(values[cell], row.get(measure, math.nan))
        bad[cell] |= not row["finite"]
    if measure == "amax":
        octaves = np.log2(np.where((values > 0) & (values < np.inf), values, np.nan))
        for step in range(len(steps)):
            before = octaves[:, max(0, step - RECENT) : step]
            above = octaves[:, step] - np.fmax.reduce(before, axis=1, initial=np.nan)
            first = np.where(np.isfinite(values[:, step]), 0.0, np.nan)
            values[:, step] = np.where(np.isnan(above), first, above)
    return Grid(layers, steps, values, bad)


@mpl.rc_context(_STYLE)
def _heat_map(each: _Map) -> str:
    """Draw a map of layers x steps, and mark the cells that are not finite."""
    layers, steps, _, bad = each.grid
    begin, end = each.ends
    figure = Figure(figsize=(MAP_WIDTH, 0.8 + 0.18 * len(layers)), layout="constrained")
    axes = figure.subplots()
    axes.patch.set(hatch="//", edgecolor=EMPTY, linewidth=0)
    show = partial(axes.imshow, aspect="auto", interpolation="nearest")
    # Clipped, because an exact result has an infinite SQNR.
    image = show(np.clip(each.part, 0, 1), cmap=COLORS, vmin=0, vmax=1)
    # Beside a tall map, the bar stays at the top and no larger than beside a short one.
    shrink = min(1, MAX_BAR / len(layers))
    bar = figure.colorbar(
        image, aspect=12, pad=0.01, ticks=[0, 0.5, 1], shrink=shrink, anchor=(0, 1)
    )
    bar.formatter = FuncFormatter(lambda x, _: units.figure(begin + x * (end - begin)))
    show(np.where(bad, 1.0, np.nan), cmap=ListedColormap([BAD]))
    ticks = range(0, len(steps), -(-len(steps) // MAX_TICKS))
    axes.set_xticks(ticks, [str(steps[tick]) for tick in ticks])
    axes.set_yticks(range(len(layers)), layers)
    axes.set_xlabel("step")
    return _picture(figure)


def _picture(figure: Figure) -> str:
    """Return an SVG as a data URI, in which browsers run no scripts."""
    file = io.StringIO()
    figure.savefig(file, format="svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue().encode()).decode()}"
