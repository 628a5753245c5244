"""Reads the folder of a run for its report, also one that is half-written, or that has wrong types.

A file that can't be read, or a line of it that doesn't have the form that its writer gives it, is
passed over and named in the notes: what remains is still worth seeing.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# What the page shows of a float8 cast. Percentages are of the elements that are not zero.
CAST_VALUES = ("amax", "underflow", "saturation", "sqnr")
METRICS = ("loss", "learning_rate", "tokens_per_second", "memory_bytes", "grad_norm")
FILES = ("config.json", "metrics.jsonl", "comm.json", "float8_stats.jsonl", "anomalies.jsonl")
# Numbers that JSON lacks, as the files name them.
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
MAX_TEXT = 300


class NoRun(Exception):
    """A folder has none of the files of a run."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What rows of float8_stats.jsonl are about: a cast of an operand, or the result of a GEMM."""

    kind: str
    what: str
    gemms: tuple[str, ...] = ()
    dtype: str = ""
    granularity: str = ""

    @property
    def label(self) -> str:
        """The kind for people."""
        if self.kind == "gemm":
            return f"result of the {self.what} GEMM"
        gemms = f", for {' and '.join(self.gemms)}" if self.gemms else ""
        return f"{self.what} as {self.dtype}, scaled per {self.granularity}{gemms}"


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of float8_stats.jsonl; `values` in the order of `CAST_VALUES`."""

    step: int
    fqn: str
    values: tuple[float, ...]
    finite: bool


@dataclasses.dataclass
class Run:
    """What a folder holds, as far as it could be read.

    Attributes:
        name: of the folder.
        config: config.json, {} if there is none.
        metrics: by step.
        comm: the rows of comm.json; None if there is no such file.
        stats: the rows of float8_stats.jsonl by what they are about; None if there is no file.
        anomalies: the rows of anomalies.jsonl; None if there is no file.
        notes: sentences about what could not be read.
    """

    name: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)
    comm: list[dict[str, Any]] | None = None
    stats: dict[Kind, list[Row]] | None = None
    anomalies: list[dict[str, Any]] | None = None
    notes: list[str] = dataclasses.field(default_factory=list)


def read_run(folder: Path) -> Run:
    """Reads what a folder holds of a run.

    Raises:
        NoRun: it is no folder, or holds none of `FILES`.
    """
    if not folder.is_dir():
        raise NoRun(f"{folder} is no folder")
    found = [name for name in FILES if (folder / name).exists()]
    if not found:
        raise NoRun(
            f"{folder} is not the folder of a run of scripts.train.train: it has none of "
            f"{', '.join(FILES)}"
        )
    run = Run(text(folder.resolve().name))
    run.config = _whole(folder / "config.json", dict, run.notes) or {}
    if "config.json" not in found:
        run.notes.append("config.json is missing: the options of the run are unknown.")
    run.metrics = dict(_rows(folder / "metrics.jsonl", metrics_row, run.notes))
    if "comm.json" in found:
        rows = _whole(folder / "comm.json", list, run.notes) or []
        run.comm = list(_checked("comm.json", rows, comm_row, run.notes))
    if "float8_stats.jsonl" in found:
        # By step and layer: where a run was continued, the later row holds.
        latest = {
            (kind, row.step, row.fqn): row
            for kind, row in _rows(folder / "float8_stats.jsonl", stats_row, run.notes)
        }
        run.stats = {}
        for (kind, _, _), row in latest.items():
            run.stats.setdefault(kind, []).append(row)
    if "anomalies.jsonl" in found:
        run.anomalies = list(_rows(folder / "anomalies.jsonl", anomaly_row, run.notes))
    return run


def _whole(path: Path, kind: type, notes: list[str]) -> Any:
    """A JSON file of a type; None if there is none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} could not be read: {text(error)}")
        return None
    if not isinstance(found, kind):
        notes.append(f"{path.name} holds a {type(found).__name__}, not a {kind.__name__}.")
        return None
    return found


def _rows(path: Path, parse: Callable[[Any], T], notes: list[str]) -> Iterator[T]:
    """The lines of a JSONL file that have the form of its rows; none where there is no file."""
    try:
        with path.open("rb") as lines:
            yield from _checked(path.name, lines, lambda line: parse(json.loads(line)), notes)
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"{path.name} could not be read: {text(error)}")


def _checked(name: str, rows: Any, parse: Callable[[Any], T], notes: list[str]) -> Iterator[T]:
    """Parses rows; those that do not have their form are passed over, and counted in a note."""
    passed_over, first = 0, None
    for number, row in enumerate(rows, 1):
        try:
            parsed = parse(row)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else error
            first = first or (number, text(why))
            passed_over += 1
            continue
        yield parsed
    if first:
        were = f"and {passed_over - 1} more were" if passed_over > 1 else "was"
        notes.append(f"{name}: row {first[0]} {were} passed over: {first[1]}")


def text(value: object) -> str:
    """A value to be shown: one line of printable characters, and not too long."""
    shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in str(value))
    return shown if len(shown) <= MAX_TEXT else f"{shown[:MAX_TEXT]}…"


def name_of(value: Any) -> str:
    """A value that must be a string."""
    if not isinstance(value, str):
        raise TypeError(f"{text(value)} is not a string")
    return text(value)


def strings(value: Any) -> list[str]:
    """The strings of a list; none of what is no list."""
    return (
        [text(name) for name in value if isinstance(name, str)] if isinstance(value, list) else []
    )


def number(value: Any) -> float:
    """A value that must be a number, or the name of one that JSON lacks; None is NaN."""
    if value is None:
        return math.nan
    if isinstance(value, str) and value in NOT_FINITE:
        return NOT_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{text(value)} is not a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError("a number has too many digits") from error


def count(value: Any) -> int:
    """A value that must be a whole number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise TypeError(f"{text(value)} is not a whole number")
    return value


def metrics_row(row: Any) -> tuple[int, dict[str, float]]:
    """The step of a line of metrics.jsonl, and its numbers. Earlier releases wrote fewer."""
    return count(row["step"]), {name: number(row[name]) for name in METRICS if name in row}


def comm_row(row: Any) -> dict[str, Any]:
    """A row of comm.json; "seconds" where the audit measured them, else None."""
    shown: dict[str, Any] = {name: name_of(row[name]) for name in ("op", "axis", "dtype", "module")}
    shown |= {name: count(row[name]) for name in ("count", "elements", "bytes", "float8_bytes")}
    seconds = number(row.get("seconds"))
    return shown | {
        "in_mixed_gather": bool(row["in_mixed_gather"]),
        "seconds": seconds if math.isfinite(seconds) else None,
    }


def stats_row(row: Any) -> tuple[Kind, Row]:
    """A row of float8_stats.jsonl, and what it is about."""
    step, fqn = count(row["step"]), name_of(row["fqn"])
    if row["kind"] == "gemm":
        sqnr = number(row["sqnr"])
        values = (math.nan,) * (len(CAST_VALUES) - 1) + (sqnr,)
        return Kind("gemm", name_of(row["gemm"])), Row(step, fqn, values, sqnr > -math.inf)
    if row["kind"] != "cast":
        raise ValueError(f"the kind {text(row['kind'])} is unknown")
    values = tuple(number(row[name]) for name in CAST_VALUES)
    kind = Kind(
        "cast",
        name_of(row["operand"]),
        tuple(name_of(gemm) for gemm in row["gemms"]),
        name_of(row["dtype"]),
        name_of(row["granularity"]),
    )
    finite = math.isfinite(values[0]) and number(row["nonfinite"]) == 0
    return kind, Row(step, fqn, values, finite)


def anomaly_row(row: Any) -> dict[str, Any]:
    """A row of anomalies.jsonl, as text but for its step."""
    shown: dict[str, Any] = {name: name_of(row[name]) for name in ("fqn", "what", "message")}
    shown["operand"] = name_of(row.get("operand") or "")
    ranks = ", ".join(str(count(rank)) for rank in row["ranks"] or ()) or "all"
    values = {name: f"{number(row.get(name)):.4g}" for name in ("value", "threshold")}
    return shown | values | {"step": count(row["step"]), "ranks": text(ranks)}
