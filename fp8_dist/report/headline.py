"""The first fault that any file of a run shows: its step, rank and layer, and how to replay it.

Metrics, statistics and recordings cover different steps, and different parts of a step. The
headline is the earliest fault. Facts that no source has are reported as unknown.
"""

import dataclasses
import math
import shlex
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path

from fp8_dist.debug.replay.comparisons import rank_names
from fp8_dist.debug.replay.findings import Finding, Replay
from fp8_dist.debug.rows import product
from fp8_dist.report.data import JsonRow, Run
from fp8_dist.text import progress

MAX_REPLAYED = 2 << 30  # the size in bytes of the largest recording that a report replays


@dataclasses.dataclass(frozen=True)
class Fault:
    """The first fault that one source shows.

    Attributes:
        step: the step in which the source shows it.
        before: the last earlier step that the source has; None if there is none.
        text: what is wrong, or unusual.
        source: ``"metrics"``, ``"statistics"`` or ``"recordings"``.
        is_wrong: whether values are non-finite or incorrect. Otherwise they are only unusual.
        fqn: the layer; None for metrics.
        ranks: the first rank that has the fault, or the candidates; empty if unknown.
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
        commands: the command that replays the fault, if it was recorded.
        is_wrong: whether something is wrong. Otherwise it is only unusual.
        fqn: the layer, if it is known.
    """

    where: str
    what: str
    commands: list[str]
    is_wrong: bool
    fqn: str | None


def headline(run: Run) -> Headline | None:
    """Return the headline of a run, or None if nothing is wrong or unusual."""
    faults = [*_faults_in_recordings(run), *_faults_in_statistics(run), *_faults_in_metrics(run)]
    # Wrong before unusual; in one step, faults that name a layer first.
    faults.sort(key=lambda fault: (not fault.is_wrong, fault.step, fault.fqn is None))
    if not faults:
        return None
    first = faults[0]
    if not first.ranks and first.fqn is not None:  # another source may have ranks
        for fault in faults:
            is_same = fault.step == first.step and fault.fqn == first.fqn and fault.is_wrong
            if is_same and fault.ranks:
                first = dataclasses.replace(first, ranks=fault.ranks)
                break
    sentences = [f"{first.text}.", *_gap(first, run)]
    if first.fqn is None:
        located = next((f for f in faults if f.fqn is not None and f.is_wrong), None)
        sentences += _casts_behind(first, located, run)
    recorded = (row["folder"] for row in run.recordings if row["step"] >= first.step)
    folder = first.folder or next(recorded, None)
    commands = []
    if folder is not None:
        commands.append(f"python -m fp8_dist.debug.replay {shlex.quote(str(folder))}")
    elif first.is_wrong:
        sentences.append("There is no recording of it to replay: fp8_dist.debug.record makes one.")
    return Headline(
        where=_where(first),
        what=" ".join(sentences),
        commands=commands,
        is_wrong=first.is_wrong,
        fqn=first.fqn,
    )


def _where(fault: Fault) -> str:
    rank = rank_names(fault.ranks, "or") if fault.ranks else None
    if rank is None and fault.is_wrong and fault.fqn is not None:
        rank = "rank unknown"
    return ", ".join(part for part in (f"step {fault.step}", rank, fault.fqn) if part is not None)


def _gap(fault: Fault, run: Run) -> Iterator[str]:
    """Yield a sentence if the source lacks steps just before a fault."""
    if fault.before is None:
        if any(row["step"] < fault.step for row in run.metrics):
            yield f"It may have begun before: {fault.source} have no earlier step."
    elif fault.before < fault.step - 1:
        begin = f"It may have begun in step {fault.before + 1}"
        yield f"{begin}: {fault.source} show nothing wrong up to step {fault.before}."


def _casts_behind(first: Fault, located: Fault | None, run: Run) -> Iterator[str]:
    """Yield sentences about the casts of a step whose metrics are not finite."""
    steps = {row["step"] for row in run.stats}
    steps |= {row["step"] for recording in run.recordings for row in recording["rows"]}
    if first.step in steps:
        yield (
            f"The casts of step {first.step} are finite: look at what is not in float8, such as "
            "the head and the loss."
        )
    else:
        yield f"No casts of step {first.step} were recorded."
    if located is not None:
        seen = f"{_where(located)}: {located.text}"
        yield f"The first bad cast that was seen may be an effect: {seen}."


def _faults_in_metrics(run: Run) -> Iterator[Fault]:
    """Yield non-finite metrics: as wrong if they stay so to the end, otherwise as unusual."""
    names: dict[tuple[bool, int], list[str]] = {}
    for name in run.metric_names:
        bad = [row["step"] for row in run.metrics if not math.isfinite(row.get(name, 0))]
        if bad:
            since = run.not_finite_since(name)
            begin = bad[0] if since is None else since
            names.setdefault((since is not None, begin), []).append(name)
    for (lasts, step), together in names.items():
        rows = [row for row in run.metrics if not row.keys().isdisjoint(together)]
        verb = "is" if len(together) == 1 else "are"
        yield Fault(
            step=step,
            before=_last_before(step, rows),
            text=f"{' and '.join(together)} {verb} not finite",
            source="metrics",
            is_wrong=lasts,
        )


def _faults_in_statistics(run: Run) -> Iterator[Fault]:
    # An SQNR of minus infinity belongs to a GEMM whose exact result is 0. It is not a NaN.
    bad = [row for row in run.stats if not row["finite"] and row.get("sqnr") != -math.inf]
    if bad:
        row = min(bad, key=itemgetter("step", "position"))
        rank = row.get("nonfinite_rank")
        share = f"{row['nonfinite']:.4g} % of the values are " if row["kind"] == "cast" else ""
        yield Fault(
            step=row["step"],
            before=_last_before(row["step"], run.stats),
            text=f"{_operand(row)}: {share}NaN or infinite",
            source="statistics",
            fqn=row["fqn"],
            ranks=() if rank is None else (rank,),
        )
    for row in run.anomalies:
        yield Fault(
            step=row["step"],
            before=_last_before(row["step"], run.stats),
            text=f"{row['cast']}: {row['message']}",
            source="statistics",
            is_wrong=row["what"] == "non-finite",
            fqn=row["fqn"],
            ranks=row["ranks"],
        )


def _operand(row: JsonRow) -> str:
    if row.get("kind") == "gemm":
        return f"the result of the GEMM of {row['gemm']}"
    return f"{product(row['operand'], row.get('folded'))} (for {', '.join(row['gemms'])})"


def _faults_in_recordings(run: Run) -> Iterator[Fault]:
    """Replay the recordings up to the first one that has an error."""
    for recording in run.recordings:
        for fault in _faults_in_recording(recording, run.notes):
            yield fault
            if fault.is_wrong:
                return


def _faults_in_recording(recording: JsonRow, notes: list[str]) -> Iterator[Fault]:
    folder = recording["folder"]
    rows = recording["rows"]
    only = (0,) if recording["world"] == 1 else ()
    try:
        findings = _replay(folder)
    except (OSError, ValueError) as error:
        notes.append(f"{folder} was not replayed: {error}")
        bad = [row for row in rows if row["nonfinite"]]
        if bad:
            row = min(bad, key=itemgetter("step", "position"))
            yield Fault(
                step=row["step"],
                before=_last_before(row["step"] - row["delayed"], rows),
                text=f"{_operand(row)}: a scale that is not finite",
                source="recordings",
                fqn=row["fqn"],
                ranks=only,
                folder=folder,
            )
        return
    for found in findings[:1]:
        # Delayed scales are computed from the amaxes of the step before.
        is_late = found.element is None and any(row["delayed"] for row in rows)
        element = "" if found.element is None else f", element {[*found.element]}"
        text = f"{found.operand} (for {', '.join(found.gemms)}){element}: {found.text}"
        if found.is_wrong and not element:
            keeps = f"record(model, folder, layers={found.fqn!r}) keeps those of each step"
            text += f". Its tensors were not kept: {keeps}"
        yield Fault(
            step=found.step,
            before=_last_before(found.step - is_late, rows),
            text=text,
            source="recordings",
            is_wrong=found.is_wrong,
            fqn=found.fqn,
            ranks=found.ranks or only,
            folder=folder,
        )


def _replay(folder: Path) -> list[Finding]:
    size = sum(path.stat().st_size for path in folder.glob("rank*.pt"))
    if size > MAX_REPLAYED:
        raise ValueError(f"it has {size / 2**30:.1f} GiB, so that is left to the command")
    progress(f"replaying {folder}")
    return Replay(folder).findings


def _last_before(step: int, rows: Iterable[JsonRow]) -> int | None:
    return max((row["step"] for row in rows if row["step"] < step), default=None)
