"""Results of a day on a GPU: JSON lines, each appended as soon as something was tried.

A program of the day is a *stage*. It calls :func:`run` with its cases, each a name and a function
that returns a :class:`Result` or raises. `scripts.bench.gpu_day` starts the stages with the options
``--results``, ``--stage`` and ``--begun``. Started by hand without them, a program prints what it
finds, and nothing else.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

# The status of a stage of which some cases failed, and of one whose device answers no more, which
# goes on in a new process. Python's own status for an error, 1, is neither.
FAILED, POISONED = 3, 75
BEHIND = "the cases behind"  # which were not made, as something failed

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Result:
    """What came of one case."""

    stage: str = ""  # the program's part of the day
    name: str = ""  # of the case, unique in its stage
    recipe: str = ""  # of the candidate: "bf16", a recipe, "torchao RECIPE"
    compiled: bool = False  # whether the candidate was compiled
    shape: str = ""  # such as "8192 x 4096 x 14336"
    readings: tuple[float, ...] = ()  # seconds, as they were taken
    bytes: int = 0  # of one reading, as flops and tokens
    flops: float = 0.0
    tokens: int = 0
    peak: int = 0  # bytes of the device's memory
    note: str = ""  # what a person wants to know besides: block sizes, decibels, a loss
    error: str = ""  # the first line of what was raised; empty if all went well
    # The device, the code, and the seconds since 1970; filled in.
    card: str = ""
    commit: str = ""
    at: float = 0.0

    @property
    def median(self) -> float:
        """The median reading, in seconds; NaN without readings."""
        return statistics.median(self.readings) if self.readings else float("nan")

    def line(self) -> str:
        """JSON on one line."""
        return json.dumps(dataclasses.asdict(self))

    def text(self) -> str:
        """The line that people read while the day goes on."""
        words = [self.stage, self.name]
        if self.readings:
            words.append(f"{1e3 * self.median:.3f} ms")
        if self.bytes and self.readings:
            words.append(f"{self.bytes / self.median / 1e9:,.0f} GB/s")
        if self.flops and self.readings:
            words.append(f"{self.flops / self.median / 1e12:,.0f} TFLOP/s")
        if self.peak:
            words.append(f"{self.peak / 1e9:.2f} GB")
        words += [self.note, f"FAILED: {self.error}" if self.error else ""]
        return ": ".join(word for word in words if word)


Case = Callable[[], Result]


def append(path: Path, result: Result) -> None:
    """Append a line in one write, so that lines of several processes do not mix.

    It begins with an empty one, which ends what a process that was stopped has left.
    """
    with path.open("ab", buffering=0) as file:
        file.write(f"\n{result.line()}\n".encode())


def read(path: Path) -> list[Result]:
    """Read the lines of a day; none, if there is no such file.

    A line that is cut off, because its writer was stopped, is left out.

    Raises:
        ValueError: another line is no result; names it.
    """
    results = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        if not line.endswith("}"):
            continue
        try:
            fields = json.loads(line)
            results.append(Result(**fields | {"readings": tuple(fields["readings"])}))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{path}, line {number}, is no result: {line[:80]!r}") from None
    return results


def add_options(parser: argparse.ArgumentParser, stage: str) -> None:
    """Add the options of a stage; by default it is called ``stage``."""
    add = parser.add_argument
    add("--stage", default=stage, help="name in the results; default: %(default)s")
    add("--results", type=Path, metavar="FILE", help="append JSON lines to it")
    begun = "names of cases that have begun: these are skipped, new ones are appended"
    add("--begun", type=Path, metavar="FILE", help=begun)
    only = "the cases alone whose names contain one of these"
    add("--only", nargs="+", default=[""], metavar="TEXT", help=only)


def run(args: argparse.Namespace, cases: Iterable[tuple[str, Case]]) -> int:
    """Run the cases that have not begun before; return the exit status.

    The status is ``FAILED`` if a case failed, and ``POISONED``, at once, if the device does not
    answer after a failure: the same command then goes on behind that case, in a new process.

    Args:
        args: of a parser with :func:`add_options`.
        cases: names and functions, which are called one after the other. A function that is to be
            measured waits for the device itself.
    """
    begun = set(args.begun.read_text().splitlines()) if args.begun and args.begun.exists() else ()
    identity = {"stage": args.stage, "card": card(), "commit": commit()}
    status = 0
    for name, function in _guarded(cases):
        is_chosen = any(text in name for text in args.only) and name not in begun
        if not is_chosen and name != BEHIND:
            continue
        if args.begun:
            with args.begun.open("a") as file:
                file.write(f"{name}\n")
        result = Result()
        try:
            result = function()
            _synchronize()
        except Exception as error:  # of one case; torch and Triton raise many types
            result = dataclasses.replace(result, error=shown(error))
        result = dataclasses.replace(result, name=name, at=time.time(), **identity)
        print(result.text(), flush=True)
        if args.results:
            append(args.results, result)
        if result.error:
            status = FAILED
            try:
                _synchronize()
            except Exception as error:
                print(f"{args.stage}: the device answers no more: {shown(error)}", flush=True)
                return POISONED
    return status


def _guarded(cases: Iterable[tuple[str, Case]]) -> Iterator[tuple[str, Case]]:
    """Yield the cases; an error of what makes them is that of a last one."""
    try:
        yield from cases
    except Exception as error:
        text = shown(error)
        yield BEHIND, lambda: Result(error=text)


def shown(error: Exception) -> str:
    """The type and the first words of an error, and of what caused it."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        first = next(iter(str(cause).strip().splitlines()), "")
        texts.append(f"{type(cause).__name__}: {first}"[:200])
        cause = cause.__cause__
    return ", caused by ".join(texts)


def card() -> str:
    """The name of the device."""
    torch = import_module("torch")
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def commit() -> str:
    """The commit of this checkout; FP8_DIST_COMMIT, where a copy has no repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        text = os.environ.get("FP8_DIST_COMMIT", "")
    return text or "unknown"


def _synchronize() -> None:
    torch = import_module("torch")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
