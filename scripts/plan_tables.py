"""The tables of scripts/plan.py, as aligned Markdown."""

from collections.abc import Iterable, Sequence

from plan_links import Links, ranks_along, seconds_by_axis, seconds_of
from plan_runs import Run
from plan_step import PHASES, Collectives

OPS = ("all_gather", "reduce_scatter", "all_reduce")
GIGA = 1e9


def markdown(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows of cells, the first of them the head; columns from `left` on are aligned right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(
        "| "
        + " | ".join(
            cell.ljust(w) if i < left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in (lines[0], rule, *lines[1:])
    )


def collectives_table(runs: Sequence[Run]) -> str:
    """A row per phase, axis, op and dtype; count and bytes of each variant."""
    cells = [{(r.phase, r.axis, r.op, r.dtype, not r.count): r for r in _rows(run)} for run in runs]
    keys = sorted({key for each in cells for key in each}, key=lambda k: (PHASES.index(k[0]), *k))
    lines = [["phase", "axis", "op", "dtype", *(run.plan.variant for run in runs)]]
    for key in keys:
        shown = [_cell([each[key]] if key in each else []) for each in cells]
        lines.append([*key[:4], *shown])
    for phase in PHASES:
        inside = [[r for r in _rows(run) if r.phase == phase] for run in runs]
        if any(inside):
            lines.append([f"all of {phase}", "", "", "", *map(_cell, inside)])
    lines.append(["all", "", "", "", *(_cell(_rows(run)) for run in runs)])
    return markdown(lines, left=4)


def memory_table(runs: Sequence[Run]) -> str:
    """Bytes by kind of each variant."""
    kinds = list(dict.fromkeys(k for run in runs if run.measured for k in run.measured.memory))
    lines = [["bytes on rank 0", *(run.plan.variant for run in runs)]]
    for kind in kinds:
        found = [run.measured.memory[kind] if run.measured else None for run in runs]
        lines.append([kind, *("" if size is None else f"{size:,}" for size in found)])
    return markdown(lines)


def time_table(runs: Sequence[Run], links: Links) -> str:
    """Predicted milliseconds by axis of each variant."""
    found = [seconds_by_axis(_rows(run), run.plan.axes, links) for run in runs]
    lines = [["predicted ms", "group of rank 0", *(run.plan.variant for run in runs)]]
    for axis in dict.fromkeys(axis for each in found for axis in each):
        ranks = ranks_along(axis, runs[0].plan.axes)
        nodes = len({rank // links.gpus_per_node for rank in ranks})
        group = f"{len(ranks):,} ranks, {nodes:,} node{'s' if nodes > 1 else ''}"
        for op in OPS:
            seconds = [each.get(axis, {}).get(op) for each in found]
            if any(s is not None for s in seconds):
                lines.append([f"{axis}: {op}", group, *map(_milliseconds, seconds)])
        totals = [sum(each[axis].values()) if axis in each else None for each in found]
        lines.append([f"{axis}: all", group, *map(_milliseconds, totals)])
    step = [sum(s for by_op in each.values() for s in by_op.values()) for each in found]
    shown = [_milliseconds(s if run.measured else None) for s, run in zip(step, runs, strict=True)]
    lines.append(["all, one after the other", "", *shown])
    return markdown(lines, left=2)


def growth_table(runs: Sequence[Run], links: Links) -> str:
    """A row per world and variant: counts, bytes, predicted time."""
    head = ["ranks", "mesh", "variant", *OPS, "of them precompute", "float8 GB", "all GB"]
    lines = [[*head, "precompute bytes", "predicted ms"]]
    for run in runs:
        rows = _rows(run)
        mesh = ",".join(f"{name}={size}" for name, size in run.plan.axes.items())
        line = [f"{run.plan.ranks:,}", mesh, run.plan.variant]
        if run.measured is None:
            lines.append([*line, *([""] * 8)])
            continue
        float8 = sum(r.bytes for r in rows if r.dtype.startswith("float8"))
        first = [r for r in rows if r.phase == "precompute"]
        seconds = sum(seconds_of(row, run.plan.axes, links) for row in rows)
        lines.append(
            [
                *line,
                *(f"{sum(r.count for r in rows if r.op == op):,}" for op in OPS),
                f"{sum(r.count for r in first):,}",
                f"{float8 / GIGA:.1f}",
                f"{sum(r.bytes for r in rows) / GIGA:.1f}",
                f"{sum(r.bytes for r in first):,}",
                _milliseconds(seconds),
            ]
        )
    return markdown(lines, left=3)


def missing(runs: Iterable[Run]) -> list[str]:
    """A sentence for each variant that could not be run."""
    return list(
        dict.fromkeys(
            f"{run.plan.variant} on {run.plan.ranks:,} ranks: no numbers: {run.reason}"
            for run in runs
            if run.measured is None
        )
    )


def _rows(run: Run) -> list[Collectives]:
    return run.measured.collectives if run.measured else []


def _cell(rows: Sequence[Collectives]) -> str:
    if not rows:
        return ""
    count = sum(row.count for row in rows)
    return f"{f'{count:,}' if count else '+'} ({sum(row.bytes for row in rows):,} B)"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.3f}"
