"""Reads the folder of a run for its report, also one that is half-written.

A line that was cut off, or that lacks what its writer gives it, is passed over and named in the
notes: what remains is still worth seeing.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# What the page shows of a float8 cast. Percentages are of the elements that are not zero.
MEASURES = ("amax", "underflow", "saturation", "sqnr")
METRICS = ("loss", "learning_rate", "tokens_per_second", "memory_bytes", "grad_norm")
FILES = ("config.json", "metrics.jsonl", "comm.json", "float8_stats.jsonl", "anomalies.jsonl")


class NoRun(Exception):
    """A folder has none of the files of a run."""


@dataclasses.dataclass
class Run:
    """Contents of a folder, as far as they could be read; rows are None where there is no file.

    Attributes:
        name: of the folder.
        config: config.json.
        metrics: the lines of metrics.jsonl.
        comm: the rows of comm.json.
        stats: of float8_stats.jsonl, each with a "label" of what it is about and "finite".
        anomalies: of anomalies.jsonl.
        notes: sentences about what could not be read.
    """

    name: str
    config: Row = dataclasses.field(default_factory=dict)
    metrics: list[Row] = dataclasses.field(default_factory=list)
    comm: list[Row] | None = None
    stats: list[Row] | None = None
    anomalies: list[Row] | None = None
    notes: list[str] = dataclasses.field(default_factory=list)


def read_run(folder: Path) -> Run:
    """Reads what a folder holds of a run.

    Raises:
        NoRun: it holds none of `FILES`.
    """
    if not any((folder / name).is_file() for name in FILES):
        raise NoRun(f"{folder} has none of the files of a run: {', '.join(FILES)}")
    run = Run(folder.resolve().name)

    def rows(name: str, parse: Callable[[Row], Row]) -> list[Row] | None:
        """The rows of a file, which has one per line or is a list of them."""
        path = folder / name
        if not path.is_file():
            return None
        text = path.read_text(errors="replace")
        try:
            lines = text.splitlines() if name.endswith("jsonl") else map(json.dumps, loaded(text))
        except ValueError as error:
            run.notes.append(f"{name} can't be read: {error}")
            return []
        found, bad = [], []
        for at, line in enumerate(lines, 1):
            try:
                found.append(parse(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                bad.append(f"row {at}: {error!r}")
        if bad:
            run.notes.append(f"{name}: {len(bad)} passed over, the first of them {bad[0]}")
        return found

    run.config = next(iter(rows("config.json", dict) or ()), {})
    run.metrics = sorted(rows("metrics.jsonl", metrics_row) or [], key=lambda row: row["step"])
    run.comm = rows("comm.json", lambda row: row | {"seconds": number(row.get("seconds"))})
    run.stats = rows("float8_stats.jsonl", stats_row)
    run.anomalies = rows("anomalies.jsonl", anomaly_row)
    return run


def loaded(text: str) -> list[Any]:
    """The elements of a JSON list; another value is the only one."""
    found = json.loads(text)
    return found if isinstance(found, list) else [found]


def number(value: Any) -> float:
    """A number, or the name of one that JSON lacks ("NaN", "Infinity"); None is NaN."""
    return math.nan if value is None else float(value)


def metrics_row(row: Row) -> Row:
    """A line of metrics.jsonl."""
    known = {metric: number(row[metric]) for metric in METRICS if metric in row}
    return {"step": int(row["step"]), **known}


def stats_row(row: Row) -> Row:
    """A row of float8_stats.jsonl."""
    found = row | {name: number(row[name]) for name in MEASURES if name in row}
    if row["kind"] == "gemm":
        finite = found["sqnr"] > -math.inf
        return found | {"label": f"result of the {row['gemm']} GEMM", "finite": finite}
    label = f"{row['operand']} as {row['dtype']}, scaled per {row['granularity']}"
    finite = math.isfinite(found["amax"]) and row["nonfinite"] == 0
    gemms = " and ".join(row["gemms"])
    return found | {"label": f"{label}, for {gemms}" if gemms else label, "finite": finite}


def anomaly_row(row: Row) -> Row:
    """A row of anomalies.jsonl, with the text of its ranks."""
    known = {name: row[name] for name in ("step", "fqn", "what", "message")}
    ranks = ", ".join(map(str, row["ranks"] or ())) or "all"
    return known | {"operand": row.get("operand") or "", "ranks": ranks}
