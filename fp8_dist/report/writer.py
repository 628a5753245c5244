"""``RunWriter``, which writes the folder of a run, from any training loop."""

import json
import math
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fp8_dist.debug import CommAudit, Float8Stats
from fp8_dist.debug.rows import anomaly_dict, append_jsonl
from fp8_dist.mesh import this_rank
from fp8_dist.text import kind_of
from fp8_dist.version import __version__

__all__ = ["RunWriter"]

CONFIG, COMM = "config.json", "comm.json"
GROWING = METRICS, STATS, ANOMALIES = "metrics.jsonl", "float8_stats.jsonl", "anomalies.jsonl"
LIMITS = "anomaly_limits"  # in config.json
# Also in config.json: the time when the writer was made, and the argument ``first``, if given.
STARTED, FIRST = "started", "first_step"


class RunWriter:
    """A writer of the folder of a run, which ``python -m fp8_dist.report FOLDER`` shows.

    ::

        stats = float8_stats(model, every=10)
        writer = RunWriter("runs/first", stats, units={"loss": "nats per token"})
        for step, batch in enumerate(batches):
            with stats:
                loss = model(batch); loss.backward()
            optimizer.step()
            writer.log(step, loss=loss)

    Make the writer and call its methods on all ranks; only rank 0 writes. The first call of ``log``
    removes the files of an earlier run from the folder, except for recordings, which the report
    leaves out. Files are closed after each call, so that a run can be read while it goes on.
    ``config.json`` has the config, the units, the limits of anomalies, versions and the time of the
    start. ``metrics.jsonl`` has the metrics and, from the second line on, ``seconds_per_step``, the
    time since the line before divided by the number of steps. ``float8_stats.jsonl`` and
    ``anomalies.jsonl`` have the rows and anomalies of ``stats``.

    Args:
        folder: the folder of the run.
        stats: statistics whose rows and anomalies are written. The writer removes the rows from
            ``stats.rows``; ``stats.table()`` still has the last ones. Default: none are written.
        config: facts about the run that JSON can represent. If it has ``steps``, the number of
            steps of the whole run, the report shows the progress.
        units: the units of metrics, by name.
        first: the first step, if the run continues an earlier one. Lines of earlier steps are kept,
            and the next block of ``stats`` has this number.
    """

    def __init__(
        self,
        folder: str | Path,
        stats: Float8Stats | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        units: Mapping[str, str] | None = None,
        first: int | None = None,
    ) -> None:
        if not isinstance(stats, Float8Stats | None):
            raise TypeError(
                f"RunWriter: stats must be what float8_stats returns, got {kind_of(stats)}"
            )
        self.folder = Path(folder)
        self._stats = stats
        self._is_writing = this_rank() == 0
        self._seen = 0  # the number of anomalies that were written
        self._last_step = math.inf  # the last step that was logged
        self._last_time = 0.0
        if stats is not None and first is not None:
            stats.at(first)
        if not self._is_writing:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, COMM):
            (self.folder / name).unlink(missing_ok=True)
        # Files of an earlier run are only removed in the first step, in case ``first`` is missing.
        self._others = [self.folder / name for name in GROWING]
        self._told: set[tuple[str, str]] = set()
        if first is not None:
            kept = [_keep_lines_before(first, path) for path in self._others]
            # ``stats`` only knows the anomalies of this process.
            self._told = {(anomaly["fqn"], anomaly["what"]) for anomaly in kept[-1]}
            self._others = []
        facts: dict[str, Any] = {
            **(config or {}),
            "units": dict(units or {}),
            "torch": torch.__version__,
            "fp8_dist": __version__,
            "python": platform.python_version(),
            STARTED: datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if stats is not None:
            facts[LIMITS] = asdict(stats.limits)
        if first is not None:
            facts[FIRST] = first
        self._write(CONFIG, facts)

    def log(self, step: int, **metrics: float | torch.Tensor) -> None:
        """Append the metrics of a step, and the rows and anomalies recorded since the last call.

        Args:
            step: the number of the step, the same as that of the last block of ``stats``.
            metrics: numbers, or tensors of one element. NaN and infinities are written too. Plain
                tensors are read on rank 0: if they differ between ranks, average them first.

        Collectives: ``full_tensor`` of each metric that is a DTensor.

        Raises:
            TypeError: a metric is neither a number nor a tensor of one element.
            ValueError: there are new rows, and the last block of ``stats`` has another number.
        """
        if self._stats is not None and self._stats.rows and self._stats.step != step:
            raise ValueError(
                f"RunWriter.log: step={step}, but the last block of the statistics was step "
                f"{self._stats.step}; enter them with `with stats.at(step):`, or log stats.step. A "
                f"run that continues needs RunWriter(..., first={step})"
            )
        for name, value in metrics.items():
            if not isinstance(value, Real | torch.Tensor):
                raise TypeError(f"RunWriter.log: {name}={value!r} must be a number or a tensor")
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise TypeError(
                        f"RunWriter.log: {name} has the shape {list(value.shape)}; log one number, "
                        "such as its mean"
                    )
                value = value.detach()
                metrics[name] = value.full_tensor() if isinstance(value, DTensor) else value
        if not self._is_writing:
            if self._stats is not None:
                self._stats.rows.clear()
            return
        while self._others:
            self._others.pop().unlink(missing_ok=True)
        if metrics:
            line = {"step": step} | {name: float(value) for name, value in metrics.items()}
            now = time.perf_counter()  # reading the values has waited for the device
            if (steps := step - self._last_step) > 0:
                line.setdefault("seconds_per_step", (now - self._last_time) / steps)
            self._last_step = step
            self._last_time = now
            append_jsonl([line], self.folder / METRICS)
        if self._stats is not None:
            new = map(anomaly_dict, self._stats.anomalies[self._seen :])
            self._seen = len(self._stats.anomalies)
            lines = [line for line in new if (line["fqn"], line["what"]) not in self._told]
            append_jsonl(lines, self.folder / ANOMALIES)
            self._stats.append_jsonl(self.folder / STATS)

    def log_audit(self, audit: CommAudit) -> None:
        """Write the collectives of one step, as rank 0 issued them.

        Args:
            audit: the result of :func:`fp8_dist.debug.comm_audit`, after its block has ended.
        """
        if self._is_writing:
            rows = [asdict(row) | {"float8_bytes": row.float8_bytes} for row in audit.rows]
            self._write(COMM, rows)

    def _write(self, name: str, value: Any) -> None:
        (self.folder / name).write_text(json.dumps(value, indent=2, default=str) + "\n")

    def sync(self) -> None:
        """Flush all written lines to disk, so that they survive a crash of the machine."""
        for name in GROWING:
            if self._is_writing and (path := self.folder / name).exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())


def _keep_lines_before(first: int, path: Path) -> list[dict[str, Any]]:
    """Remove the lines of the step ``first`` and later ones from a file; return the other lines."""
    if not path.exists():
        return []
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        with suppress(ValueError, KeyError, TypeError):  # a line that was cut off
            if json.loads(line)["step"] < first and line.endswith("\n"):
                kept.append(line)
    # Replace the file atomically, so that a run that is killed here loses no line.
    new = path.with_name(f".{path.name}.new")
    new.write_text("".join(kept))
    new.replace(path)
    return [json.loads(line) for line in kept]
