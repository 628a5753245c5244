"""Runs one of the three calls of a day on a GPU: stages in groups, with one deadline for all.

    python -m scripts.bench.gpu_day A FOLDER      is it right?
    python -m scripts.bench.gpu_day B FOLDER      how fast is it?
    python -m scripts.bench.gpu_day C FOLDER      does it train?

A stage is a process. It appends each result to FOLDER/results.jsonl at once
(`scripts.bench.gpu_results`). No stage stops another: one that crashes, or whose device answers no
more, goes on behind the case that did it, in a new process. So does one of whose cases takes too
long. At the end of its group's time a stage is stopped, and what it found is kept. What the stages
print is in FOLDER/log_CALL.tgz at the end. The exit status is 1 if a result is an error.
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
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from scripts.bench.gpu_results import FAILED, POISONED, Result, append, card, commit, read
from scripts.common.options import command_parser

POLL = 0.05  # seconds between looks at a process
PATIENCE = 5.0  # seconds until a process that is killed has ended
SHOWN = 40  # errors that are printed at the end


@dataclass(frozen=True)
class Stage:
    """A process of the day."""

    name: str  # in the results
    words: tuple[str, ...]  # of its command, behind the interpreter
    patience: float = 45.0  # seconds that one of its cases may take


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

START = Group(25, (stage("start", SPEED, "versions"),))
# The most valuable first. A group that ends early leaves its time to those behind it.
CALLS: dict[str, tuple[Group, ...]] = {
    "A": (
        START,
        Group(46, parts("kernels", 12, SMOKE, "kernels")),
        Group(
            153,
            (
                *parts("inductor", 4, SMOKE, "inductor"),
                stage("ranks", TESTS, SHARED, "--workers", "4", patience=150),
                stage(
                    "tests", TESTS, "tests/gpu", "--ignore", SHARED, "--workers", "8", patience=100
                ),
            ),
        ),
        Group(32, (stage("rates", SPEED, "rates"),)),
    ),
    "B": (
        START,
        Group(35, (stage("kernel rates", SPEED, "kernels"),)),
        Group(95, (stage("layers", SPEED, "layers"),)),
        Group(98, (stage("blocks", SPEED, "blocks", patience=60),)),
    ),
    "C": (
        START,
        Group(13, (stage("nccl", SPEED, "nccl"),)),
        Group(22, (stage("experts", SPEED, "experts"),)),
        Group(73, (stage("training", SPEED, "training", patience=50),)),
    ),
}
SECONDS = {"A": 260, "B": 260, "C": 137}


class Day:
    """What the stages of a call share.

    Attributes:
        python: the interpreter of the stages.
        results: the file of results, in the folder that is given.
        logs: for what is printed, and for the names of cases that have begun.
        identity: of this machine and code, in results that no stage can write itself.
        stopped: set when the day is stopped from outside.
    """

    def __init__(self, python: str, folder: Path, logs: Path) -> None:
        self.python = python
        self.results = folder / "results.jsonl"
        self.logs = logs
        self.stopped = Event()
        try:
            self.identity = {"card": card(), "commit": commit()}
        except Exception as error:  # of a device that is broken: the stages say more
            self.identity = {"card": type(error).__name__, "commit": commit()}

    def run(self, groups: Sequence[Group], begin: float, seconds: float) -> None:
        """Run groups one after the other; each ends when those up to it have used their time.

        Args:
            begin: of the call, on the monotonic clock.
            seconds: of the call.
        """
        used = 0.0
        for group in groups:
            used += group.seconds
            running = [Running(self, stage, begin + min(used, seconds)) for stage in group.stages]
            with ThreadPoolExecutor(len(running)) as pool:
                for run, outcome in zip(running, pool.map(Running.run, running), strict=True):
                    print(f"{run.stage.name}: {outcome}", flush=True)


class Running:
    """A stage on its way, started again behind each case that ended its process."""

    def __init__(self, day: Day, stage: Stage, end: float) -> None:
        self.day = day
        self.stage = stage
        self.end = end
        file = stage.name.replace(" ", "_")
        self.begun = day.logs / f"{file}.begun"
        self.log = day.logs / f"{file}.log"
        self.command = [day.python, *stage.words, "--stage", stage.name]
        self.command += ["--results", str(day.results), "--begun", str(self.begun)]

    def run(self) -> str:
        """Run it to its end, or to that of its time; return how it ended, in a few words."""
        begin = time.monotonic()
        try:
            outcome = self._processes()
        except Exception as error:  # of this stage: the others go on
            outcome = f"could not be run: {error}"
        return f"{outcome} after {time.monotonic() - begin:.0f} s, {len(self._names())} cases"

    def _processes(self) -> str:
        while True:
            before = len(self._names())
            reason, status = self._one_process()
            if not reason and status in (0, FAILED):
                return "some cases failed" if status else "went well"
            outcome = reason or _ended_by(status)
            if status != POISONED:
                self._blame(outcome)
            if self._is_over() or len(self._names()) == before:
                return outcome

    def _one_process(self) -> tuple[str, int]:
        """Run the command; return why it was stopped, and its status."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},  # what a killed stage printed is kept
            )
        begin = time.time()
        reason = ""
        try:
            while process.poll() is None and not reason:
                time.sleep(POLL)
                quiet = time.time() - max(begin, self._changed())
                if self._is_over():
                    reason = "stopped at the end of its time"
                elif quiet > self.stage.patience:
                    reason = f"stopped after {quiet:.0f} s without a result"
            if process.poll() is not None:
                reason = ""
        finally:
            with suppress(ProcessLookupError):  # ranks and compilers that it started, too
                os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a driver may hold a process for ever
            process.wait(PATIENCE)
        return reason, process.returncode if process.returncode is not None else -signal.SIGKILL

    def _is_over(self) -> bool:
        return self.day.stopped.is_set() or time.monotonic() >= self.end

    def _changed(self) -> float:
        return self.begun.stat().st_mtime if self.begun.exists() else 0.0

    def _names(self) -> list[str]:
        return self.begun.read_text().splitlines() if self.begun.exists() else []

    def _blame(self, reason: str) -> None:
        """Write a line for each case without one; else for the start, or the end, of the stage."""
        written = {r.name for r in read(self.day.results) if r.stage == self.stage.name}
        names = self._names()
        for name in [n for n in names if n not in written] or ["end" if names else "start"]:
            identity = self.day.identity | {"at": time.time()}
            append(self.day.results, Result(self.stage.name, name, error=reason, **identity))


def _ended_by(status: int) -> str:
    if status == POISONED:
        return "the device answers no more"
    name = signal.Signals(-status).name if status < 0 else f"status {status}"
    return f"ended with {name}"


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("scripts.bench.gpu_day", __doc__)
    add = parser.add_argument
    add("call", choices=[*CALLS])
    add("folder", type=Path)
    since = "when the call began, in seconds since 1970; default: now"
    add("--since", type=float, default=time.time(), help=since)
    add("--python", default=sys.executable, help="interpreter of the stages")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = args.folder.resolve()
    with tempfile.TemporaryDirectory() as logs:
        day = Day(args.python, folder, Path(logs))
        before = len(read(day.results))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: day.stopped.set())
        begin = time.monotonic() - (time.time() - args.since)
        try:
            day.run(CALLS[args.call], begin, SECONDS[args.call])
        finally:
            with tarfile.open(folder / f"log_{args.call}.tgz", "w:gz") as archive:
                archive.add(logs, f"logs_{args.call}")
    results = read(day.results)[before:]
    failed = [result for result in results if result.error]
    print(f"{len(results)} results, {len(failed)} of them errors")
    for result in failed[:SHOWN]:
        print(result.text())
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
