"""Reads the folder of a run for its report, also one that is half-written, or that has wrong types.

A file that can't be read, or a line of it that doesn't have the form that its writer gives it, is
passed over and named in the notes: what remains is still worth seeing.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# What the page shows of a float8 cast. Percentages are of the elements that are not zero.
MEASURES = ("amax", "underflow", "saturation", "sqnr")
METRICS = ("loss", "learning_rate", "tokens_per_second", "memory_bytes", "grad_norm")
FILES = ("config.json", "metrics.jsonl", "comm.json", "float8_stats.jsonl", "anomalies.jsonl")
# Numbers that JSON lacks, as the files name them.
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf, None: math.nan}
MAX_TEXT = 300


class NoRun(Exception):
    """A folder has none of the files of a run."""


@dataclasses.dataclass
class Run:
    """What a folder holds, as far as it could be read; rows are None where there is no file.

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
    found = {name: folder / name for name in FILES if (folder / name).is_file()}
    if not found:
        raise NoRun(f"{folder} has none of the files of a run: {', '.join(FILES)}")
    run = Run(text(folder.resolve().name))

    def rows(name: str, parse: Callable[[Any], Row]) -> list[Row] | None:
        return _parsed(name, _lines(found[name]), parse, run.notes) if name in found else None

    if "config.json" in found:
        configs = _parsed("config.json", [found["config.json"].read_bytes()], _config, run.notes)
        run.config = configs[0] if configs else {}
    else:
        run.notes.append("config.json is missing: the options of the run are unknown.")
    run.metrics = sorted(rows("metrics.jsonl", metrics_row) or [], key=lambda row: row["step"])
    if "comm.json" in found:
        run.comm = _parsed("comm.json", _elements(found["comm.json"]), comm_row, run.notes)
    run.stats = rows("float8_stats.jsonl", stats_row)
    run.anomalies = rows("anomalies.jsonl", anomaly_row)
    return run


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def _elements(path: Path) -> list[bytes]:
    """The elements of a JSON list, as lines; the file itself where it holds none."""
    content = path.read_bytes()
    try:
        found = json.loads(content)
        return [json.dumps(each).encode() for each in found] if isinstance(found, list) else [b"0"]
    except (ValueError, RecursionError):
        return [content]


def _parsed(
    name: str, lines: Iterable[bytes], parse: Callable[[Any], Row], notes: list[str]
) -> list[Row]:
    """The rows of a file; what does not have their form is passed over, and counted in a note."""
    rows, bad = [], []
    for at, line in enumerate(lines, 1):
        try:
            rows.append(parse(json.loads(line)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            bad.append(f"row {at}: {text(repr(error))}")
    if bad:
        notes.append(f"{name}: {len(bad)} passed over, the first of them {bad[0]}")
    return rows


def text(value: object) -> str:
    """A value to be shown: one line of printable characters, and not too long."""
    shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in str(value))
    return shown if len(shown) <= MAX_TEXT else f"{shown[:MAX_TEXT]}…"


def name(value: Any) -> str:
    """A value that must be a string."""
    if not isinstance(value, str):
        raise TypeError(f"{text(value)} is not a string")
    return text(value)


def number(value: Any) -> float:
    """A value that must be a number, or the name of one that JSON lacks; None is NaN."""
    if value is None or isinstance(value, str):
        return NOT_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 10**300:
        raise TypeError(f"{text(value)} is not a number")
    return float(value)


def count(value: Any) -> int:
    """A value that must be a whole number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise TypeError(f"{text(value)} is not a whole number")
    return value


def _fields(row: Any, **kinds: Callable[[Any], Any]) -> Row:
    if not isinstance(row, dict):
        raise TypeError(f"{text(row)} is not a row")
    return {field: kind(row[field]) for field, kind in kinds.items()}


def _config(row: Any) -> Row:
    if not isinstance(row, dict):
        raise TypeError(f"{text(row)} is not an object")
    return row


def metrics_row(row: Any) -> Row:
    """A line of metrics.jsonl."""
    known = {metric: number for metric in METRICS if metric in row}
    return _fields(row, step=count, **known)


def comm_row(row: Any) -> Row:
    """A row of comm.json; "seconds" are NaN where the audit did not measure them."""
    names = dict.fromkeys(("op", "axis", "dtype", "module"), name)
    sizes = dict.fromkeys(("count", "elements", "bytes", "float8_bytes"), count)
    found = _fields(row, **names, **sizes, in_mixed_gather=bool)
    return found | {"seconds": number(row.get("seconds"))}


def stats_row(row: Any) -> Row:
    """A row of float8_stats.jsonl."""
    kind = _fields(row, kind=name)["kind"]
    if kind == "gemm":
        found = _fields(row, step=count, fqn=name, gemm=name, sqnr=number)
        label = f"result of the {found['gemm']} GEMM"
        return found | {"label": label, "finite": found["sqnr"] > -math.inf}
    if kind != "cast":
        raise ValueError(f"the kind {kind} is unknown")
    names = dict.fromkeys(("fqn", "operand", "dtype", "granularity"), name)
    values = dict.fromkeys((*MEASURES, "nonfinite"), number)
    found = _fields(row, step=count, **names, **values)
    gemms = " and ".join(name(gemm) for gemm in row["gemms"])
    label = f"{found['operand']} as {found['dtype']}, scaled per {found['granularity']}"
    finite = math.isfinite(found["amax"]) and found["nonfinite"] == 0
    return found | {"label": f"{label}, for {gemms}" if gemms else label, "finite": finite}


def anomaly_row(row: Any) -> Row:
    """A row of anomalies.jsonl."""
    found = _fields(row, step=count, fqn=name, what=name, message=name)
    ranks = ", ".join(str(count(rank)) for rank in row["ranks"] or ()) or "all"
    return found | {"operand": name(row.get("operand") or ""), "ranks": text(ranks)}
