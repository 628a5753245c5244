"""The first bad thing that any file of a run shows: its step, rank and layer, and how to replay it.

Metrics, statistics and recordings see different steps, and different parts of a step. What the
earliest of them saw leads. What is not known, because no source was looking, is said to be unknown.
"""

import dataclasses
import math
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from fp8_dist.debug.replay.comparisons import rank_names
from fp8_dist.debug.replay.findings import Replay
from fp8_dist.debug.rows import product
from fp8_dist.report.data import Row, Run, progress

MAX_REPLAYED = 2 << 30  # bytes of a recording that a report replays


@dataclasses.dataclass(frozen=True)
class Fault:
    """The first bad thing that one source shows.

    Attributes:
        step: the step in which the source shows it.
        before: the last step in which it looked and showed nothing; None if there is none.
        text: what is wrong, or unusual.
        source: what shows it.
        is_wrong: whether values are not finite, or not those that they should be.
        fqn: the layer; None of metrics.
        ranks: the first rank that has it, or the candidates; empty if that is not known.
        folder: the recording that shows it.
    """

    step: int
    before: int | None
    text: str
    source: str
    is_wrong: bool = True
    fqn: str | None = None
    ranks: tuple[int, ...] = ()
    folder: Path | None = None


@dataclasses.dataclass(frozen=True)
class Headline:
    """The first lines of a report.

    Attributes:
        where: the step, and the rank and the layer if they are known.
        what: sentences about what is wrong there.
        commands: the command that replays it, if it was recorded.
        is_wrong: whether something is wrong; else it is only unusual.
        fqn: the layer.
    """

    where: str
    what: str
    commands: list[str]
    is_wrong: bool
    fqn: str | None


def headline(run: Run) -> Headline | None:
    """Return the headline of a run, or None if nothing is wrong or unusual."""
    faults = [*_of_recordings(run), *_of_statistics(run), *_of_metrics(run)]
    # What is wrong comes before what is unusual, and of one step what names a layer.
    faults.sort(key=lambda fault: (not fault.is_wrong, fault.step, fault.fqn is None))
    if not faults:
        return None
    first = faults[0]
    if not first.ranks and first.fqn is not None:  # another source may know them
        same = [f for f in faults if (f.step, f.fqn, f.is_wrong) == (first.step, first.fqn, True)]
        first = dataclasses.replace(first, ranks=next((f.ranks for f in same if f.ranks), ()))
    sentences = [f"{first.text}.", *_gap(first, run)]
    recorded = [row["folder"] for row in run.recordings if row["step"] >= first.step]
    folder = first.folder or next(iter(recorded), None)
    commands = []
    if folder is not None:
        commands.append(f"python -m fp8_dist.debug.replay {shlex.quote(str(folder))}")
    elif first.is_wrong:
        sentences.append("There is no recording of it to replay: fp8_dist.debug.record makes one.")
    return Headline(_where(first), " ".join(sentences), commands, first.is_wrong, first.fqn)


def _where(fault: Fault) -> str:
    rank = rank_names(fault.ranks, "or") if fault.ranks else None
    if rank is None and fault.is_wrong and fault.fqn is not None:
        rank = "rank unknown"
    parts = f"step {fault.step}", rank, fault.fqn
    return ", ".join(part for part in parts if part is not None)


def _gap(fault: Fault, run: Run) -> Iterator[str]:
    """Say that the steps before a fault were not looked at."""
    if fault.before is None:
        if any(row["step"] < fault.step for row in run.metrics):
            yield f"It may have begun before: {fault.source} have no earlier step."
    elif fault.before < fault.step - 1:
        begin = f"It may have begun in step {fault.before + 1}"
        yield f"{begin}: {fault.source} show nothing wrong up to step {fault.before}."


def _of_metrics(run: Run) -> Iterator[Fault]:
    """Yield metrics that are not finite to the end as wrong, others as unusual."""
    names: dict[tuple[bool, int], list[str]] = {}
    for name in run.metric_names:
        since = run.not_finite_since(name)
        bad = [row["step"] for row in run.metrics if not math.isfinite(row.get(name, 0))]
        if bad:
            begin = bad[0] if since is None else since
            names.setdefault((since is not None, begin), []).append(name)
    for (lasts, step), together in names.items():
        before = [_last_before(step, [r for r in run.metrics if name in r]) for name in together]
        verb = "is" if len(together) == 1 else "are"
        text = f"{' and '.join(together)} {verb} not finite"
        known = max((each for each in before if each is not None), default=None)
        yield Fault(step, known, text, "metrics", lasts)


def _of_statistics(run: Run) -> Iterator[Fault]:
    # (A GEMM that loses all has an SQNR of minus infinity, which is not NaN.)
    bad = [row for row in run.stats if not row["finite"] and row.get("sqnr") != -math.inf]
    if bad:
        row = min(bad, key=lambda row: (row["step"], row["position"]))
        step, rank = row["step"], row.get("nonfinite_rank")
        ranks = () if rank is None else (rank,)
        before, text = _last_before(step, run.stats), f"{_operand(row)}: {_share(row)}"
        yield Fault(step, before, text, "statistics", True, row["fqn"], ranks)
    for row in run.anomalies:
        is_wrong, text = row["what"] == "non-finite", f"{row['cast']}: {row['message']}"
        known = row["step"], _last_before(row["step"], run.stats), text, "statistics", is_wrong
        yield Fault(*known, row["fqn"], () if row["rank"] is None else (row["rank"],))


def _operand(row: Row) -> str:
    if row.get("kind") == "gemm":
        return f"the result of the GEMM of {row['gemm']}"
    return f"{product(row['operand'], row.get('folded'))} (for {', '.join(row['gemms'])})"


def _share(row: Row) -> str:
    share = f"{row['nonfinite']:.4g} % of the values are " if row["kind"] == "cast" else ""
    return f"{share}NaN or infinite"


def _of_recordings(run: Run) -> Iterator[Fault]:
    """Replay the recordings up to the first one with something wrong."""
    for recording in run.recordings:
        for fault in _of_recording(recording, run.notes):
            yield fault
            if fault.is_wrong:
                return


def _of_recording(recording: Row, notes: list[str]) -> Iterator[Fault]:
    folder, rows = recording["folder"], recording["rows"]
    only = (0,) if recording["world"] == 1 else ()
    try:
        size = sum(path.stat().st_size for path in folder.glob("rank*.pt"))
        if size > MAX_REPLAYED:
            raise ValueError(f"it has {size / 2**30:.1f} GiB, so that is left to the command")
        progress(f"replaying {folder}")
        findings = Replay(folder).findings[:1]
    except (OSError, ValueError) as error:
        notes.append(f"{folder} was not replayed: {error}")
        bad = [row for row in rows if row["nonfinite"]]
        for row in sorted(bad, key=lambda row: (row["step"], row["position"]))[:1]:
            text = f"{_operand(row)}: a scale that is not finite"
            before = _last_before(row["step"] - row["delayed"], rows)
            yield Fault(row["step"], before, text, "recordings", True, row["fqn"], only, folder)
        return
    for found in findings:
        # Delayed scales are those of the step before.
        is_late = found.element is None and any(row["delayed"] for row in rows)
        element = "" if found.element is None else f", element {[*found.element]}"
        text = f"{found.operand} (for {', '.join(found.gemms)}){element}: {found.text}"
        if found.is_wrong and not element:
            keeps = f"record(model, folder, layers={found.fqn!r}) keeps those of each step"
            text += f". Its tensors were not kept: {keeps}"
        known = found.step, _last_before(found.step - is_late, rows), text, "recordings"
        yield Fault(*known, found.is_wrong, found.fqn, found.ranks or only, folder)


def _last_before(step: int, rows: Iterable[Row]) -> int | None:
    return max((row["step"] for row in rows if row["step"] < step), default=None)
