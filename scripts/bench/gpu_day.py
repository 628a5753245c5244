"""Run one of three calls that test and time the library on a GPU, each with a deadline.

    python -m scripts.bench.gpu_day A FOLDER      is it right?
    python -m scripts.bench.gpu_day B FOLDER      how fast is it?
    python -m scripts.bench.gpu_day C FOLDER      does it train?

A call runs groups of stages. A stage is a process that appends each result to FOLDER/results.jsonl
at once (`scripts.bench.gpu_results`). Stages do not stop each other. If a case crashes, hangs, or
breaks the device, its stage continues with the next case in a new process. When the time of its
group is over, a stage is stopped, and its results are kept. At the end FOLDER/log_CALL.tgz has the
output of all stages. The exit status is 1 if a result is an error.
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

POLL = 0.05  # seconds between two polls of a process
PATIENCE = 5.0  # seconds to wait for the end of a killed process
SHOWN = 40  # the number of errors that are printed at the end


@dataclass(frozen=True)
class Stage:
    """A process of a call."""

    name: str  # in the results
    words: tuple[str, ...]  # arguments of the interpreter
    patience: float = 45.0  # seconds that one of its cases may take


@dataclass(frozen=True)
class Group:
    """Stages that run at the same time, and the seconds that they have."""

    seconds: float
    stages: tuple[Stage, ...]


def stage(name: str, module: str, *arguments: str, patience: float = 45.0) -> Stage:
    """Make a stage of a module of `scripts.bench`."""
    return Stage(name, ("-m", f"scripts.bench.{module}", *arguments), patience)


SPEED, TESTS = "gpu", "gpu_tests"
SHARED = "tests/gpu/test_gpu_shared.py"

START = Group(25, (stage("start", SPEED, "versions"),))
# The most valuable first. If a group ends early, later groups get the rest of its time.
CALLS: dict[str, tuple[Group, ...]] = {
    "A": (
        START,
        Group(
            199,
            (
                stage("ranks", TESTS, SHARED, "--workers", "4", patience=150),
                stage(
                    "tests", TESTS, "tests/gpu", "--ignore", SHARED, "--workers", "12", patience=100
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
    """The state that the stages of a call share.

    Attributes:
        python: the interpreter of the stages.
        results: the file of results, in the given folder.
        logs: the folder for output, and for the names of cases that have begun.
        identity: the card and the commit, for results that are written on behalf of a stage.
        stopped: set when the call is stopped from outside.
    """

    def __init__(self, python: str, folder: Path, logs: Path) -> None:
        self.python = python
        self.results = folder / "results.jsonl"
        self.logs = logs
        self.stopped = Event()
        try:
            self.identity = {"card": card(), "commit": commit()}
        except Exception as error:  # a broken device, about which the stages say more
            self.identity = {"card": type(error).__name__, "commit": commit()}

    def run(self, groups: Sequence[Group], begin: float, seconds: float) -> None:
        """Run groups one after the other. The end of each is the sum of the times up to it.

        Args:
            begin: when the call began, on the monotonic clock.
            seconds: the time of the whole call.
        """
        used = 0.0
        for group in groups:
            used += group.seconds
            running = [Running(self, stage, begin + min(used, seconds)) for stage in group.stages]
            with ThreadPoolExecutor(len(running)) as pool:
                for run, outcome in zip(running, pool.map(Running.run, running), strict=True):
                    print(f"{run.stage.name}: {outcome}", flush=True)


class Running:
    """A running stage. After a case that ends its process, it is started again at the next case."""

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
        """Run the stage until it ends or its time is over; return how it ended, in a few words."""
        begin = time.monotonic()
        try:
            outcome = self._processes()
        except Exception as error:  # only this stage fails; the others go on
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
        """Run the command; return why it was stopped ("" if it ended by itself), and its status."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},  # keep the output of a killed stage
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
            with suppress(ProcessLookupError):  # also kills its ranks and compilers
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
        """Write an error for each begun case without a result, or for the stage's start or end."""
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
