"""The results of `scripts.bench.gpu_day`: JSON lines, each appended as soon as a case ends.

A *stage* is a program that calls :func:`run` with its cases. A case is a name, and a function that
returns a :class:`Result` or raises. `scripts.bench.gpu_day` starts stages with the options
``--results``, ``--stage`` and ``--begun``. Without them, a program that is started by hand only
prints its results.
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

# The exit status of a stage if some cases failed, and if the device no longer answers, so that the
# stage must go on in a new process. Neither is 1, Python's own status for an error.
FAILED, POISONED = 3, 75
BEHIND = "the cases behind"  # the name of a case that reports a failure to generate cases

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Result:
    """The result of one case."""

    stage: str = ""  # the name of the stage
    name: str = ""  # the name of the case, unique in its stage
    recipe: str = ""  # of the candidate: "bf16", a recipe, "torchao RECIPE"
    compiled: bool = False  # whether the candidate was compiled
    shape: str = ""  # such as "8192 x 4096 x 14336"
    readings: tuple[float, ...] = ()  # seconds, as they were taken
    bytes: int = 0  # per reading, like flops and tokens
    flops: float = 0.0
    tokens: int = 0
    peak: int = 0  # bytes of device memory
    note: str = ""  # other facts for people: block sizes, decibels, a loss
    error: str = ""  # what was raised, shortened; empty if all went well
    # The device, the code, and the time in seconds since 1970; filled in by `run`.
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
        """The line that is printed for people."""
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

    A newline comes first, in case a stopped process has left an unfinished line.
    """
    with path.open("ab", buffering=0) as file:
        file.write(f"\n{result.line()}\n".encode())


def read(path: Path) -> list[Result]:
    """Read the results in a file; none if the file does not exist.

    Lines that are cut off, because their writer was stopped, are left out.

    Raises:
        ValueError: another line is not a result; the message names it.
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
    """Add the options of a stage, whose default name is ``stage``."""
    add = parser.add_argument
    add("--stage", default=stage, help="name in the results; default: %(default)s")
    add("--results", type=Path, metavar="FILE", help="append JSON lines to it")
    begun = "names of cases that have begun: these are skipped, new ones are appended"
    add("--begun", type=Path, metavar="FILE", help=begun)
    only = "the cases alone whose names contain one of these"
    add("--only", nargs="+", default=[""], metavar="TEXT", help=only)


def run(args: argparse.Namespace, cases: Iterable[tuple[str, Case]]) -> int:
    """Run the cases that have not begun before; return the exit status.

    The status is ``FAILED`` if a case failed. If the device does not answer after a failure, this
    returns ``POISONED`` at once, and the same command continues at the next case in a new process.

    Args:
        args: the options, from a parser with :func:`add_options`.
        cases: names and functions, which are called one after the other. A function that measures
            times must wait for the device itself.
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
        except Exception as error:  # only this case fails; torch and Triton raise many types
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
    """Yield the cases. If generating them fails, a last case has the error."""
    try:
        yield from cases
    except Exception as error:
        text = shown(error)
        yield BEHIND, lambda: Result(error=text)


def shown(error: Exception) -> str:
    """The type and the first words of an error, and of its causes."""
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
    """The commit of this checkout, or FP8_DIST_COMMIT if this is a copy without a repository."""
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
