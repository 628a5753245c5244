"""The figures of a report, as Plotly takes them."""

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.train.report_data import MEASURES, Row, Run

Array = npt.NDArray[Any]
Figure = dict[str, Any]

BAD, EMPTY = "#d1247f", "#e9ecf0"
# Of each metric: its title, what it is multiplied by, and the scale of its axis.
LINES = {
    "loss": ("loss, nats per byte", 1.0, "linear"),
    "learning_rate": ("learning rate", 1.0, "linear"),
    "tokens_per_second": ("tokens/s", 1.0, "linear"),
    "memory_bytes": ("memory, GiB", 2.0**-30, "linear"),
    "grad_norm": ("norm of the gradients, before clipping", 1.0, "log"),
}
HEATS = {
    "amax": ("log2 of the amax: the largest absolute value", "amax 2^%{z:.1f}"),
    "underflow": ("% of non-zero elements that became zero in float8", "%{z:.3~g} % underflow"),
    "saturation": ("% of elements that were clamped to the largest", "%{z:.3~g} % saturated"),
    "sqnr": ("SQNR in dB: signal to quantization noise", "SQNR %{z:.2f} dB"),
}


def figures(run: Run) -> dict[str, Figure]:
    """Every figure that the run has data for, by the id of its place."""
    drawn = {metric: line_figure(run, metric) for metric in LINES}
    drawn |= {measure: heat_figure(run.stats or [], measure) for measure in MEASURES}
    return {place: figure for place, figure in drawn.items() if figure["data"]}


def line_figure(run: Run, metric: str) -> Figure:
    """A metric over steps, with a gap where it is not finite; anomalies are dotted lines."""
    title, factor, scale = LINES[metric]
    rows = [row for row in run.metrics if metric in row]
    xs = [row["step"] for row in rows]
    ys = [factor * row[metric] if math.isfinite(row[metric]) else None for row in rows]
    steps = sorted({row["step"] for row in run.anomalies or []})[:20]
    marks = {"type": "line", "yref": "paper", "y0": 0, "y1": 1}
    dotted = {"color": BAD, "width": 1, "dash": "dot"}
    axes = {"xaxis": {"title": "step"}, "yaxis": {"type": scale}}
    shapes = [{**marks, "x0": step, "x1": step, "line": dotted} for step in steps]
    mode = "lines" if len(xs) > 30 else "lines+markers"
    data = [{"type": "scatter", "mode": mode, "x": xs, "y": ys}] if xs else []
    return {"data": data, "layout": _layout(title, 260, shapes=shapes, **axes)}


def heat_figure(stats: list[Row], measure: str) -> Figure:
    """Layers x steps of a measure; a menu chooses among what was measured, such as operands."""
    by_label: dict[str, list[Row]] = {}
    for row in stats:
        if measure in row:
            by_label.setdefault(row["label"], []).append(row)
    traces = [(label, trace) for label, rows in by_label.items() for trace in heat(rows, measure)]
    buttons = [
        {
            "label": escaped(label),
            "method": "restyle",
            "args": [{"visible": [label == of for of, _ in traces]}],
        }
        for label in by_label
    ]
    for label, trace in traces:
        trace["visible"] = label == traces[0][0]
    menu = {"buttons": buttons, "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"}
    layers = max((len({row["fqn"] for row in rows}) for rows in by_label.values()), default=0)
    title, _ = HEATS[measure]
    layout = _layout(
        title,
        min(max(120 + 15 * layers, 220), 900),
        updatemenus=[menu] if buttons else [],
        plot_bgcolor=EMPTY,
        xaxis={"title": "step", "showgrid": False},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False, "automargin": True},
    )
    return {"data": [trace for _, trace in traces], "layout": layout}


def heat(rows: list[Row], measure: str) -> list[Figure]:
    """The map of one kind of rows, and the cells in it that are not finite."""
    layers, steps, values, bad = grid(rows, measure)
    if measure == "amax":
        values = np.log2(np.where(values > 0, values, np.nan))
    finite = values[np.isfinite(values)]
    low, high = np.percentile(finite, [1, 99]) if finite.size else (0.0, 1.0)
    shared = {"type": "heatmap", "x": steps, "y": [escaped(layer) for layer in layers]}
    where = "<b>%{y}</b><br>step %{x}<br>"
    shown = {
        **shared,
        "z": listed(np.clip(values, -1e30, 1e30)),  # an exact result has an infinite SQNR
        "zmin": float(low),
        "zmax": float(max(high, low + 1)),
        "colorscale": "Cividis",
        "reversescale": measure == "sqnr",
        "hovertemplate": f"{where}{HEATS[measure][1]}<extra></extra>",
    }
    if not bad.any():
        return [shown]
    marks = {
        **shared,
        "z": listed(np.where(bad, 1.0, np.nan)),
        "colorscale": [[0, BAD], [1, BAD]],
        "showscale": False,
        "hovertemplate": f"{where}has values that are not finite<extra></extra>",
    }
    return [shown, marks]


def grid(rows: list[Row], measure: str) -> tuple[list[str], list[int], Array, Array]:
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


def listed(values: Array) -> list[list[float | None]]:
    """As JSON can hold it, in few digits."""
    return [[None if math.isnan(v) else float(f"{v:.4g}") for v in line] for line in values]


def escaped(name: str) -> str:
    """Plotly reads some HTML in its texts."""
    return re.sub(r"[&<>\"']", lambda letter: f"&#{ord(letter[0])};", name)


def _layout(title: str, height: int, **more: Any) -> Figure:
    margin = {"l": 60, "r": 20, "t": 60, "b": 40}
    return {"title": {"text": title, "x": 0}, "height": height, "margin": margin, **more}
