"""Reader of the folder of a run, which may be incomplete.

A line that is cut off, or that lacks a field, is skipped and named in the notes, because the other
lines are still worth seeing.
"""

import dataclasses
import errno
import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch

from fp8_dist.debug import AnomalyLimits, CommRow
from fp8_dist.debug.audit import CommTable
from fp8_dist.debug.recording import recordings_in
from fp8_dist.debug.rows import product
from fp8_dist.report import writer
from fp8_dist.text import progress

JsonRow = dict[str, Any]
_T = TypeVar("_T")

# Numbers of a float8 cast. Percentages are of the elements that are not zero.
MEASURES = ("amax", "underflow", "saturation", "nonfinite", "sqnr")
# The fields that are read from a recording's statistics.
RECORDED = ("step", "position", "fqn", "operand", "gemms", "folded", "delayed", "nonfinite")
LAST_STEPS = 20  # the number of last steps by which a run is judged
FILES = (writer.CONFIG, *writer.GROWING, writer.COMM)


@dataclasses.dataclass
class Run:
    """Contents of a folder, as far as they could be read.

    Attributes:
        name: the name of the folder.
        config: config.json, with the limits of anomalies as AnomalyLimits.
        metrics: one row for each step of metrics.jsonl.
        comm: the collectives of comm.json; None if they could not be read.
        stats: the rows of float8_stats.jsonl, in the order of layers; see :func:`stats_row`.
        anomalies: the rows of anomalies.jsonl.
        recordings: the recordings of ``fp8_dist.debug.record`` in the run's folder and subfolders,
            by step, except those of an earlier run.
        notes: sentences about what could not be read.
    """

    name: str
    config: JsonRow = dataclasses.field(default_factory=lambda: {writer.LIMITS: AnomalyLimits()})
    metrics: list[JsonRow] = dataclasses.field(default_factory=list)
    comm: CommTable | None = None
    stats: list[JsonRow] = dataclasses.field(default_factory=list)
    anomalies: list[JsonRow] = dataclasses.field(default_factory=list)
    recordings: list[JsonRow] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def metric_names(self) -> list[str]:
        """The metrics, in the order in which they were first logged."""
        return list(dict.fromkeys(name for row in self.metrics for name in row if name != "step"))

    def not_finite_since(self, metric: str) -> int | None:
        """Return the step since which no value of a metric is finite; None if the last one is."""
        rows = [row for row in self.metrics if metric in row]
        bad = [*takewhile(lambda row: not math.isfinite(row[metric]), reversed(rows))]
        return bad[-1]["step"] if bad else None


def names_of(folders: list[Path]) -> list[str]:
    """Return the names of runs: those of their folders, or, of folders named alike, the paths."""
    names = [folder.resolve().name for folder in folders]
    return [
        str(folder) if names.count(name) > 1 else name
        for folder, name in zip(folders, names, strict=True)
    ]


def read_runs(folders: list[Path]) -> list[Run]:
    """Read several runs, and name them with :func:`names_of`."""
    runs = [read_run(folder) for folder in folders]
    for run, name in zip(runs, names_of(folders), strict=True):
        run.name = name
    return runs


def read_run(folder: Path) -> Run:
    """Read the folder of a run.

    Raises:
        FileNotFoundError: the folder has none of ``FILES``, and no recording.
    """
    recordings = recordings_in(folder.absolute())
    if not recordings and not any((folder / name).is_file() for name in FILES):
        text = f"has none of the files of a run: {', '.join(FILES)}"
        raise FileNotFoundError(errno.ENOENT, text, str(folder))
    progress(f"reading {folder}")
    run = Run(folder.resolve().name)

    def rows(name: str, parse: Callable[[Any], _T]) -> list[_T]:
        """Return the parsed rows of a file: one for each line, or one for all of a .json file."""
        path = folder / name
        if not path.is_file():
            return []
        text = path.read_text(errors="replace")
        parsed, errors = [], []
        for number, row in enumerate(text.splitlines() if name in writer.GROWING else [text], 1):
            try:
                parsed.append(parse(json.loads(row)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                errors.append(f"row {number}: {error!r}")
        if errors:
            run.notes.append(f"{path}: {len(errors)} passed over, the first of them {errors[0]}")
        return parsed

    run.config = next(iter(rows(writer.CONFIG, _config)), run.config)
    steps: dict[int, JsonRow] = {}
    for row in rows(writer.METRICS, _metrics_row):
        steps.setdefault(row["step"], {}).update(row)
    run.metrics = [steps[step] for step in sorted(steps)]
    run.comm = next(iter(rows(writer.COMM, lambda all: CommTable(map(_comm_row, all)))), None)
    for path in recordings:
        _read_recording(run, path)
    run.stats = rows(writer.STATS, stats_row)
    run.anomalies = rows(writer.ANOMALIES, _anomaly_row)
    return run


def _read_recording(run: Run, folder: Path) -> None:
    path = min(folder.glob("rank*.pt"))
    try:
        # With mmap, the data of the tensors are not read.
        file = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        layers = [*dict.fromkeys(record["fqn"] for record in file["records"])]
        recording = {
            "step": int(file["step"]),
            "reason": file["reason"],
            "layers": layers,
            "rows": [{name: row[name] for name in RECORDED} for row in file["rows"]],
            "world": file["world"],
            "folder": folder,
        }
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        started = run.config.get(writer.STARTED, written.isoformat())
        is_older = written < datetime.fromisoformat(started)
        is_left = is_older and recording["step"] >= run.config.get(writer.FIRST, 0)
    except Exception as error:  # reading unknown bytes may raise anything
        run.notes.append(f"{folder} can't be read: {error!r}")
        return
    if is_left:
        run.notes.append(f"{folder} is left out: an earlier run wrote it")
    else:
        run.recordings.append(recording)


def differences(run: Run, baseline: Run) -> dict[int, float]:
    """Return the loss of a run minus the baseline's, by step, where both are finite."""
    baselines = {row["step"]: row["loss"] for row in baseline.metrics if "loss" in row}
    rows = [row for row in run.metrics if "loss" in row and row["step"] in baselines]
    values = {row["step"]: row["loss"] - baselines[row["step"]] for row in rows}
    return {step: value for step, value in values.items() if math.isfinite(value)}


def _number(value: Any) -> float:
    """Convert a number, or a string ("NaN", "Infinity"), to a float; None becomes NaN."""
    return math.nan if value is None else float(value)


def _config(row: JsonRow) -> JsonRow:
    return row | {writer.LIMITS: AnomalyLimits(**row.get(writer.LIMITS, {}))}


def _metrics_row(row: JsonRow) -> JsonRow:
    return {name: _number(value) for name, value in row.items()} | {"step": int(row["step"])}


def _comm_row(row: JsonRow) -> CommRow:
    fields = {f.name: row[f.name] for f in dataclasses.fields(CommRow) if f.name in row}
    return CommRow(**fields | {"dtype": getattr(torch, row["dtype"].removeprefix("torch."))})


def stats_row(row: JsonRow) -> JsonRow:
    """Parse a row of float8_stats.jsonl, and add its "label" and whether it is "finite"."""
    parsed = row | {name: _number(row[name]) for name in MEASURES if name in row}
    parsed |= {"step": int(row["step"]), "position": int(row.get("position", 0))}
    if row["kind"] == "gemm":
        finite = parsed["sqnr"] > -math.inf
        return parsed | {"label": f"result of the {row['gemm']} GEMM", "finite": finite}
    operand, gemms = product(row["operand"], row.get("folded")), " and ".join(row["gemms"])
    label = f"{operand} as {row['dtype']}, scaled per {row['granularity']}, for {gemms}"
    finite = math.isfinite(parsed["amax"]) and row["nonfinite"] == 0
    return parsed | {"label": label, "finite": finite}


def _anomaly_row(row: JsonRow) -> JsonRow:
    text = row["message"].removeprefix(f"step {row['step']}: {row['fqn']}: ")
    cast, _, message = text.partition(": ")
    parsed = {name: row[name] for name in ("step", "fqn", "what")}
    return parsed | {"cast": cast, "message": message, "ranks": tuple(row["ranks"] or ())}
