"""Runs one of the three calls of a day on a GPU: stages in groups, with one deadline for all.

    python -m scripts.bench.gpu_day A FOLDER      is it right?
    python -m scripts.bench.gpu_day B FOLDER      how fast is it?
    python -m scripts.bench.gpu_day C FOLDER      does it train?

A stage is a process. It appends each result to FOLDER/results.jsonl at once
(`scripts.bench.gpu_results`). No stage stops another: one that crashes, or whose device answers no
more, goes on behind the case that did it, in a new process. So does one of whose cases takes too
long. At the end of its group's time a stage is stopped, and what it found is kept. What the stages
print is in FOLDER/log.tgz at the end. The exit status is 1 if a result is an error.
"""

import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.bench.gpu_results import POISONED, Result, append, card, commit, read
from scripts.common.options import command_parser, positive

POLL = 0.05  # seconds between looks at a process
AGAIN = 30.0  # seconds for what failed before
SHOWN = 40  # errors that are printed at the end


@dataclass(frozen=True)
class Stage:
    """A process of the day.

    Attributes:
        name: in the results.
        words: of its command, behind the interpreter.
        patience: seconds that one of its cases may take.
    """

    name: str
    words: tuple[str, ...]
    patience: float = 45.0


@dataclass(frozen=True)
class Group:
    """Stages that run at the same time, and how many seconds they have."""

    seconds: float
    stages: tuple[Stage, ...]


def stage(name: str, module: str, *arguments: str, patience: float = 45.0) -> Stage:
    """Make a stage of a module of `scripts.bench`."""
    return Stage(name, ("-m", f"scripts.bench.{module}", *arguments), patience)


def parts(name: str, count: int, module: str, *arguments: str) -> tuple[Stage, ...]:
    """Make stages that share the cases of one."""
    return tuple(
        stage(f"{name} {i}", module, *arguments, "--part", f"{i}/{count}")
        for i in range(1, count + 1)
    )


SMOKE, SPEED, TESTS = "gpu_smoke", "gpu", "gpu_tests"
SHARED = "tests/gpu/test_gpu_shared.py"

START = Group(
    10,
    (stage("start", "gpu_probe", "--only", "versions"), stage("cache", "gpu_ahead", "--look")),
)
# The most valuable first. A group that ends early leaves its time to those behind it. FOLDER stands
# for that of the results.
CALLS: dict[str, tuple[Group, ...]] = {
    "A": (
        START,
        Group(52, (*parts("kernels", 6, SMOKE, "kernels"), stage("gemms", SMOKE, "gemms"))),
        Group(
            108,
            (
                stage("steps", SMOKE, "steps"),
                stage("inductor", SMOKE, "inductor"),
                stage("ranks", TESTS, SHARED, patience=100),
                stage(
                    "tests", TESTS, "tests/gpu", "--ignore", SHARED, "--workers", "8", patience=100
                ),
            ),
        ),
        Group(35, (stage("rates", "gpu_probe"),)),
    ),
    "B": (
        START,
        Group(35, (stage("kernel rates", "gpu_kernels"),)),
        Group(115, (stage("layers", SPEED, "layers"),)),
        Group(95, (stage("blocks", SPEED, "blocks", patience=60),)),
    ),
    "C": (
        START,
        Group(90, (stage("training", "gpu_train", patience=40),)),
        Group(20, (stage("experts", SPEED, "experts"),)),
        Group(12, (stage("trace", "gpu_kernels", "--trace", "FOLDER"),)),
        Group(13, (stage("nccl", SPEED, "nccl"),)),
    ),
}
SECONDS = {"A": 210, "B": 260, "C": 150}


class Running:
    """A stage on its way, started again behind each case that ended its process."""

    def __init__(self, stage: Stage, python: str, folder: Path, logs: Path, end: float) -> None:
        self.stage = stage
        self.end = end
        self.results = folder / "results.jsonl"
        file = stage.name.replace(" ", "_")
        self.begun = logs / f"{file}.begun"
        self.log = logs / f"{file}.log"
        words = [str(folder) if word == "FOLDER" else word for word in stage.words]
        self.command = [python, *words, "--stage", stage.name]
        self.command += ["--results", str(self.results), "--begun", str(self.begun)]

    def run(self) -> str:
        """Run it to its end, or to that of its time; return how it ended, in a few words."""
        begin = time.monotonic()
        while True:
            before = len(self._names())
            reason, status = self._one_process()
            if not reason and status in (0, 1):
                outcome = "went well" if status == 0 else "some cases failed"
                break
            if status != POISONED:
                self._blame(reason or _ended_by(status))
            outcome = reason or _ended_by(status)
            if time.monotonic() >= self.end or len(self._names()) == before:
                break
        return f"{outcome} after {time.monotonic() - begin:.0f} s, {len(self._names())} cases"

    def _one_process(self) -> tuple[str, int]:
        """Run the command; return why it was stopped, and its status."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            begin = time.time()
            reason = ""
            while process.poll() is None and not reason:
                time.sleep(POLL)
                quiet = time.time() - max(begin, self._changed())
                if time.monotonic() >= self.end:
                    reason = "stopped at the end of its time"
                elif quiet > self.stage.patience:
                    reason = f"stopped after {quiet:.0f} s without a result"
            with suppress(ProcessLookupError):  # ranks and compilers that it started, too
                os.killpg(process.pid, signal.SIGKILL)
            return reason, process.wait()

    def _changed(self) -> float:
        return self.begun.stat().st_mtime if self.begun.exists() else 0.0

    def _names(self) -> list[str]:
        return self.begun.read_text().splitlines() if self.begun.exists() else []

    def _blame(self, reason: str) -> None:
        """Write a line for the case that ended the process, or for a start that failed."""
        name = next(reversed(self._names()), "start")
        written = read(self.results) if self.results.exists() else []
        if any((result.stage, result.name) == (self.stage.name, name) for result in written):
            name = "end"
        identity = {"card": card(), "commit": commit(), "at": time.time()}
        append(self.results, Result(self.stage.name, name, error=reason, **identity))


def _ended_by(status: int) -> str:
    if status == POISONED:
        return "the device answers no more"
    name = signal.Signals(-status).name if status < 0 else f"status {status}"
    return f"ended with {name}"


def run_call(
    groups: Sequence[Group], seconds: float, folder: Path, logs: Path, python: str
) -> None:
    """Run groups one after the other; each ends when those up to it have used their time."""
    begin, used = time.monotonic(), 0.0
    for group in groups:
        used += group.seconds
        end = begin + min(used, seconds)
        running = [Running(each, python, folder, logs, end) for each in group.stages]
        with ThreadPoolExecutor(len(running)) as pool:
            for each, outcome in zip(running, pool.map(Running.run, running), strict=True):
                print(f"{each.stage.name}: {outcome}", flush=True)


def groups_of(call: str, again: Path | None, factor: float) -> list[Group]:
    """Return the groups of a call with so many times their seconds.

    ``again``: results of another call, of which what failed is tried again first.
    """
    groups = [*again_of(again), *CALLS[call]] if again else CALLS[call]
    return [
        Group(factor * seconds, tuple(replace(s, patience=factor * s.patience) for s in stages))
        for seconds, stages in ((group.seconds, group.stages) for group in groups)
    ]


def again_of(again: Path) -> list[Group]:
    """Return a group of the stages that have errors in results."""
    failed = {result.stage for result in read(again) if result.error}
    every = {stage.name: stage for groups in CALLS.values() for group in groups
             for stage in group.stages}  # fmt: skip
    repeated = [
        Stage(f"{name}, again", (*each.words, "--again", str(again), "--of", name), each.patience)
        for name, each in every.items()
        if name in failed
    ]
    return [Group(AGAIN, tuple(repeated))] if repeated else []


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = command_parser("scripts.bench.gpu_day", __doc__)
    add = parser.add_argument
    add("call", choices=[*CALLS])
    add("folder", type=Path)
    add("--seconds", type=positive, help="for the whole call; default: 210, 260 and 150")
    add("--python", default=sys.executable, help="interpreter of the stages")
    add("--again", type=Path, metavar="FILE", help="first try again what failed in these results")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = args.folder.resolve()
    results = folder / "results.jsonl"
    before = len(read(results)) if results.exists() else 0
    seconds = args.seconds or SECONDS[args.call]
    groups = groups_of(args.call, args.again, seconds / SECONDS[args.call])
    with tempfile.TemporaryDirectory() as logs:
        run_call(groups, seconds, folder, Path(logs), args.python)
        with tarfile.open(folder / "log.tgz", "w:gz") as archive:
            archive.add(logs, f"logs_{args.call}")
    found = read(results)[before:] if results.exists() else []
    failed = [result for result in found if result.error]
    print(f"{len(found)} results, {len(failed)} of them errors")
    for result in failed[:SHOWN]:
        print(result.text())
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
