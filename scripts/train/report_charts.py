"""What the charts of a run's report draw: lines and grids, small enough for a browser."""

import base64
import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.train.report_data import CAST_VALUES, Kind, Row, Run, strings

# A line of more steps is drawn by the smallest and the largest value of each of so many parts.
MAX_PARTS = 1000
# A heat map of more cells has columns of several steps: each shows the worst of them.
MAX_CELLS = 120_000
MAX_COLUMNS = 600
# A longer name of a layer is shown by its end on the axis.
MAX_LABEL = 44

MISSING, FINITE, NOT_FINITE = 0, 1, 2

Array = npt.NDArray[Any]


def line(run: Run, name: str) -> dict[str, list[float | None]]:
    """The steps and values of a metric; None where a value is not finite. {} if no step has it."""
    points = [(step, row[name]) for step, row in sorted(run.metrics.items()) if name in row]
    if not points:
        return {}
    kept = [points[index] for index in representative(np.array([y for _, y in points]))]
    return {
        "x": [step for step, _ in kept],
        "y": [value if math.isfinite(value) else None for _, value in kept],
    }


def representative(values: Array) -> list[int]:
    """Indices, ascending: all, or the smallest, the largest and the first NaN of each part."""
    if len(values) <= 2 * MAX_PARTS:
        return list(range(len(values)))
    chosen: set[int] = {0, len(values) - 1}
    for part in np.array_split(np.arange(len(values)), MAX_PARTS):
        here = values[part]
        finite = np.isfinite(here)
        if finite.any():
            chosen.add(int(part[np.where(finite, here, np.inf).argmin()]))
            chosen.add(int(part[np.where(finite, here, -np.inf).argmax()]))
        if not finite.all():
            chosen.add(int(part[finite.argmin()]))
    return sorted(chosen)


def grids(run: Run) -> list[dict[str, Any]]:
    """For each kind of rows, casts first: layers x columns of steps, as `grid` describes them."""
    stats = run.stats or {}
    order = {"input": 0, "weight": 1, "grad_output": 2}
    kinds = sorted(stats, key=lambda kind: (kind.kind, order.get(kind.what, 3), kind.label))
    return [grid(kind, stats[kind], layers_in_order(run)) for kind in kinds]


def layers_in_order(run: Run) -> dict[str, int]:
    """The position of each layer: of the model, as config.json has it, then as rows name them."""
    names = strings(run.config.get("float8_layers"))
    names += [row.fqn for rows in (run.stats or {}).values() for row in rows]
    return {name: position for position, name in enumerate(dict.fromkeys(names))}


def grid(kind: Kind, rows: list[Row], order: dict[str, int]) -> dict[str, Any]:
    """The values of one kind of rows.

    Returns:
        `layers` and their `labels`, shorter; the `steps` of each column, as text, and the `last`
        one of each; `state` of each cell, as uint8: `MISSING`, `FINITE`, `NOT_FINITE`; and the
        `CAST_VALUES`, as float32: of several steps the largest amax, underflow and saturation,
        and the smallest SQNR. Arrays are base64 of rows of little-endian numbers.
    """
    layers = sorted({row.fqn for row in rows}, key=order.__getitem__)
    steps = sorted({row.step for row in rows})
    row_of = {fqn: index for index, fqn in enumerate(layers)}
    column_of = {step: index for index, step in enumerate(steps)}
    at = (
        np.array([row_of[row.fqn] for row in rows]),
        np.array([column_of[row.step] for row in rows]),
    )
    parts = np.array_split(np.arange(len(steps)), columns_for(len(layers), len(steps)))
    starts = [part[0] for part in parts]
    state = np.full((len(layers), len(steps)), MISSING, np.uint8)
    state[at] = [FINITE if row.finite else NOT_FINITE for row in rows]
    found: dict[str, Any] = {
        "kind": kind.kind,
        "label": kind.label,
        "layers": layers,
        "labels": labels(layers),
        "steps": [span(steps[part[0]], steps[part[-1]]) for part in parts],
        "last": [steps[part[-1]] for part in parts],
        "state": encoded(np.maximum.reduceat(state, starts, axis=1)),
    }
    for index, name in enumerate(CAST_VALUES):
        values = np.full(state.shape, np.nan, np.float32)
        with np.errstate(over="ignore"):  # of what float32 can't hold: it is shown as infinite
            values[at] = np.array([row.values[index] for row in rows])
        worst = np.fmin if name == "sqnr" else np.fmax
        found[name] = encoded(worst.reduceat(values, starts, axis=1))
    return found


def columns_for(layers: int, steps: int) -> int:
    """How many columns a heat map has."""
    return max(1, min(steps, MAX_COLUMNS, MAX_CELLS // layers))


def span(first: int, last: int) -> str:
    """One step, or several."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def labels(layers: list[str]) -> list[str]:
    """The ends of long names; each differs from the others. The model itself has no name."""
    short = [name if len(name) <= MAX_LABEL else f"…{name[-MAX_LABEL:]}" for name in layers]
    times = Counter(short)
    return [
        (name or "(the model)") if times[name] == 1 else f"{name} ({index})"
        for index, name in enumerate(short)
    ]


def encoded(values: Array) -> str:
    """An array as base64."""
    data = values.astype(values.dtype.newbyteorder("<")).tobytes()
    return base64.b64encode(data).decode("ascii")
