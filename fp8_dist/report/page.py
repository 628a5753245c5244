"""The HTML page of a report: how runs went, where anomalies are, and all float8 casts."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import StrictUndefined, Template

from fp8_dist.debug import CommRow
from fp8_dist.report import units
from fp8_dist.report.data import LAST_STEPS, JsonRow, Run, differences, read_runs
from fp8_dist.report.figures import charts, color, heat_maps, layer_chart, worst_layers
from fp8_dist.report.headline import Headline, headline
from fp8_dist.report.writer import FIRST, LIMITS, STARTED
from fp8_dist.text import progress

MAX_ANOMALIES = 200  # the largest number of rows in their table
MAX_LAYERS = 8  # layers of a run whose anomalies have a picture
HIDDEN = {"float8_layers", "units", LIMITS, STARTED, FIRST}  # in config.json, but not shown


def write(path: Path, folders: list[Path]) -> tuple[list[str], list[str]]:
    """Write the page of runs atomically. Progress goes to stderr.

    Returns:
        The headlines or verdicts of the runs as text, and notes on what could not be read.
    """
    runs = read_runs(folders)
    pairs = [(run, headline(run)) for run in runs]
    for run in runs:
        for row in run.recordings:
            row["link"] = os.path.relpath(row["folder"], path.parent)
    new = path.with_name(f".{path.name}.new")
    new.write_text(render(pairs), encoding="utf-8")
    new.replace(path)
    texts = []
    for run, first in pairs:
        if first is None:
            texts.append(" ".join([f"{run.name}: no fault found.", *verdict(run, runs[0])]))
        else:
            found = f"{run.name}: {first.where}: {first.what}"
            texts.append("\n  ".join([found, *first.commands]))
    return texts, [note for run in runs for note in run.notes]


def render(pairs: Sequence[tuple[Run, Headline | None]]) -> str:
    """Return the HTML of the page. A run has a headline if anything is wrong or unusual."""
    runs = [run for run, _ in pairs]
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    template = Template(
        text, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    progress(f"drawing {len(runs)} runs" if len(runs) > 1 else f"drawing {runs[0].name}")
    pictures = charts(runs)
    return template.render(
        runs=runs,
        verdicts=[
            (run.name, first, " ".join(verdict(run, runs[0])))
            for run, first in sorted(pairs, key=lambda p: 2 if p[1] is None else not p[1].is_wrong)
        ],
        worst=worst_layers(runs),
        is_wrong=any(first.is_wrong for _, first in pairs if first is not None),
        summary=summary(runs),
        anomalies=[row for i, (run, first) in enumerate(pairs) for row in anomalies(i, run, first)],
        max_anomalies=MAX_ANOMALIES,
        layers=[
            (anchor, run, fqn, layer_chart(run, fqn))
            for i, (run, first) in enumerate(pairs)
            for fqn, anchor in anchors(i, run, first).items()
        ],
        charts=pictures,
        columns=columns(len(pictures)),
        colors=[(run.name, color(i)) for i, run in enumerate(runs)],
        heat_maps=list(heat_maps(runs)),
        last_steps=LAST_STEPS,
        collectives=collectives(runs),
        config=config(runs),
    )


def summary(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table of numbers, one row for each run."""
    names = dict.fromkeys(name for run in runs for name in run.metric_names)
    metrics = {name: units.shown(name, runs) for name in names}
    header = ["run", "logged steps", *(shown.label for shown in metrics.values())]
    rows = []
    for run in runs:
        cells = [run.name, _logged(run)]
        cells += [shown_metric(run, name, shown.divisor) for name, shown in metrics.items()]
        layers = len({row["fqn"] for row in run.stats} or run.config.get("float8_layers", ()))
        cells += [f"{layers:,}" if layers else "", f"{len(run.anomalies):,}"]
        comm = run.comm.rows if run.comm else []
        if comm:
            cells.append(units.size(sum(row.bytes for row in comm)))
            cells.append(units.size(sum(row.bf16_bytes for row in comm)))
        else:
            cells += ["", ""]
        rows.append(cells)
    header += ["float8 layers", "anomalies", "a step sends", "in bf16 it would send"]
    shown = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return [header[i] for i in shown], [[row[i] for i in shown] for row in rows]


def _logged(run: Run) -> str:
    """Format the number of logged steps, and the progress of the run."""
    count = len(run.metrics)
    total = run.config.get("steps")
    if not total:
        return f"{count:,}"
    if count in (0, total):
        return f"{count:,} of {plain(total)}"
    return f"{count:,}, up to step {run.metrics[-1]['step']:,} of {plain(total)}"


def shown_metric(run: Run, name: str, divisor: float) -> str:
    """Format a metric: its median over the last steps, or the step since which it is not finite."""
    last = [row[name] for row in run.metrics if name in row][-LAST_STEPS:]
    if (since := run.not_finite_since(name)) is not None:
        return f"{'NaN' if math.isnan(last[-1]) else 'infinite'} since step {since}"
    values = [value for value in last if math.isfinite(value)]
    return units.figure(median(values) / divisor) if values else ""


def plain(value: Any) -> str:
    """Format a value of config.json for display."""
    return f"{value:,}" if type(value) is int else str(value)


def collectives(runs: Sequence[Run]) -> tuple[list[str], list[tuple[list[str], list[str]]]] | None:
    """Return a table of the collectives of one step, side by side; None if no run has them.

    Returns:
        The names of the runs that have them; and for each kind its collective, its axis and its
        dtype, and for each of these runs a count, a size and the size in bf16.
    """
    tables = {run.name: run.comm.without_modules() for run in runs if run.comm is not None}
    if not tables:
        return None
    by_kind: dict[tuple[Any, ...], dict[str, CommRow]] = {}
    for name, table in tables.items():
        for row in table.rows:
            kind = (row.op, row.axis, row.dtype, row.in_mixed_gather)
            by_kind.setdefault(kind, {})[name] = row
    rows = []
    for (op, axis, dtype, _), by_run in by_kind.items():
        cells = [cell for name in tables for cell in _collective(by_run.get(name))]
        rows.append(([op, axis, str(dtype).removeprefix("torch.")], cells))
    return [*tables], rows


def _collective(row: CommRow | None) -> list[str]:
    if row is None:
        return [""] * 3
    count = "+" if row.in_mixed_gather else f"{row.count:,}"
    return [count, units.size(row.bytes), units.size(row.bf16_bytes)]


def columns(charts: int) -> int:
    """Return how many charts a line has, so that the last line has the fewest gaps."""
    return min((4, 3), key=lambda count: -charts % count) if charts > 2 else 2


def config(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the entries of config.json by name, each with the values of all runs."""
    names = dict.fromkeys(name for run in runs for name in run.config if name not in HIDDEN)
    return [(name, [plain(run.config.get(name, "")) for run in runs]) for name in names]


def verdict(run: Run, baseline: Run) -> Iterator[str]:
    """Yield sentences about a run."""
    for name in run.metric_names:
        if bad := [row["step"] for row in run.metrics if not math.isfinite(row.get(name, 0))]:
            yield f"{name} is not finite in {len(bad)} steps, first in {bad[0]}."
    last = [*differences(run, baseline).values()][-LAST_STEPS:]
    if last and run is not baseline:
        over = f"Over the last {len(last)} common steps"
        yield f"{over} the loss minus {baseline.name}'s is {median(last):+.2g} (median)."
    if run.anomalies:
        first = run.anomalies[0]
        count = "1 anomaly," if len(run.anomalies) == 1 else f"{len(run.anomalies):,} anomalies,"
        begin = f"{count} the first in step {first['step']}"
        yield f"{begin}: {first['fqn']}, {first['cast']}: {first['message']}."
    elif run.stats:
        steps = len({row["step"] for row in run.stats})
        yield f"No anomalies in the casts of {steps:,} recorded steps."
    elif run.config.get("float8_layers") == []:
        yield "It has no float8 layers."
    else:
        yield "No casts were recorded."


def anchors(index: int, run: Run, first: Headline | None) -> dict[str, str]:
    """Map layers to anchors of their pictures: the headline's layer, then those with anomalies."""
    layers = [row["fqn"] for row in run.anomalies]
    if first is not None and first.fqn in {row["fqn"] for row in run.stats}:
        layers.insert(0, first.fqn)
    layers = list(dict.fromkeys(layers))[:MAX_LAYERS]
    return {fqn: f"layer-{index}-{j}" for j, fqn in enumerate(layers)}


def anomalies(index: int, run: Run, first: Headline | None) -> Iterator[JsonRow]:
    """Yield the first anomalies of a run, with links to the pictures of their layers."""
    pictures = anchors(index, run, first)
    for row in run.anomalies[:MAX_ANOMALIES]:
        yield row | {"run": run.name, "picture": pictures.get(row["fqn"])}
