"""The page of runs: how they went, where anomalies are, and all float8 casts."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jinja2

from fp8_dist.report.data import Row, Run, read_runs
from fp8_dist.report.figures import charts, heat_maps, layer_chart

MAX_ANOMALIES = 200  # rows of their table
MAX_LAYERS = 30  # with anomalies that have a picture, of each run
LAST_STEPS = 20
HIDDEN = {"float8_layers", "units"}  # of config.json


def write(path: Path, folders: list[Path]) -> list[str]:
    """Write the page of runs at once: nobody sees half of one. Return what could not be read."""
    runs = read_runs(folders)
    new = path.with_name(f".{path.name}.new")
    new.write_text(render(runs), encoding="utf-8")
    os.replace(new, path)
    return [note for run in runs for note in run.notes]


def render(runs: Sequence[Run]) -> str:
    """Return the page of runs."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        runs=runs,
        summary=summary(runs),
        alerts=[alert for run in runs for alert in alerts(run, f"{run.name}: " * (len(runs) > 1))],
        anomalies=[row for i, run in enumerate(runs) for row in anomalies(i, run)],
        max_anomalies=MAX_ANOMALIES,
        layers=[
            (f"layer-{i}-{j}", run, fqn, layer_chart(run, fqn))
            for i, run in enumerate(runs)
            for j, fqn in enumerate(layers_with_anomalies(run))
        ],
        charts=charts(runs),
        heat_maps=list(heat_maps(runs)),
        collectives=[(r, r.comm.without_modules().rows) for r in runs if r.comm is not None],
        config=config(runs),
    )


def summary(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table of figures, one row for each run."""
    units = {k: unit for run in runs for k, unit in run.config.get("units", {}).items()}
    names = list(dict.fromkeys(name for run in runs for name in run.metric_names))
    header = ["run", "logged steps", *(f"{n}, {units[n]}" if n in units else n for n in names)]
    rows = []
    for run in runs:
        total = run.config.get("steps")
        cells = [run.name, f"{len(run.metrics):,}" + (f" of {plain(total)}" if total else "")]
        for name in names:
            last = [row[name] for row in run.metrics if name in row][-LAST_STEPS:]
            values = [value for value in last if math.isfinite(value)]
            cells.append(shown_number(median(values)) if values else "")
        layers = len({row["fqn"] for row in run.stats or []} or run.config.get("float8_layers", ()))
        cells += [f"{layers:,}" if layers else "", f"{len(run.anomalies):,}"]
        comm = run.comm.rows if run.comm else []
        size = sum(row.bytes for row in comm)
        part = sum(row.float8_bytes for row in comm) / (size or 1)
        cells.append(f"{size / 1e6:,.1f} MB, {part:.0%} float8" if size else "")
        rows.append(cells)
    header += ["float8 layers", "anomalies", "collectives of a step"]
    shown = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return [header[i] for i in shown], [[row[i] for i in shown] for row in rows]


def shown_number(value: float) -> str:
    """Format a metric for people."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.5g}"


def plain(value: Any) -> str:
    """Format a value of config.json for people."""
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_count else str(value)


def config(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the facts about the runs, by name, with a value of each run."""
    names = dict.fromkeys(name for run in runs for name in run.config if name not in HIDDEN)
    return [(name, [plain(run.config.get(name, "")) for run in runs]) for name in names]


def alerts(run: Run, prefix: str) -> Iterator[str]:
    """Yield sentences about metrics that are not finite."""
    for name in run.metric_names:
        bad = [row["step"] for row in run.metrics if not math.isfinite(row.get(name, 0))]
        if bad:
            yield f"{prefix}{name} is not finite in {len(bad)} steps, first in {bad[0]}."


def layers_with_anomalies(run: Run) -> list[str]:
    """Return the first layers with anomalies, which have a picture."""
    return list(dict.fromkeys(row["fqn"] for row in run.anomalies))[:MAX_LAYERS]


def anomalies(index: int, run: Run) -> Iterator[Row]:
    """Yield the first anomalies of a run, with links to the pictures of their layers."""
    layers = layers_with_anomalies(run)
    for row in run.anomalies[:MAX_ANOMALIES]:
        at = row["fqn"]
        link = f"#layer-{index}-{layers.index(at)}" if at in layers else ""
        yield row | {"run": run.name, "layer_link": link}
