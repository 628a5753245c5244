"""Cases of a stage of `scripts.prove`, and their results: JSON lines, each appended at once."""

import dataclasses
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

START = "start"  # the name of a case that failed before the first one
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Result:
    """The result of a case on one rank."""

    stage: str = ""
    name: str = ""  # of the case, unique in its stage
    recipe: str = ""  # of the candidate: "bf16", a recipe, "torchao RECIPE"
    compiled: bool = False  # whether the candidate was compiled
    shape: str = ""  # such as "8192 x 4096 x 14336"
    readings: tuple[float, ...] = ()  # seconds, as they were taken
    bytes: int = 0  # per reading, like flops and tokens
    flops: float = 0.0
    tokens: int = 0
    peak: int = 0  # bytes of device memory
    values: dict[str, Any] = field(default_factory=dict)  # other numbers, by name
    note: str = ""  # other facts for people
    wrong: str = ""  # the first bit or byte that is wrong; empty if all are right
    error: str = ""  # why the case has no result: what was raised, or how its process ended
    # Filled in by `Worker.run`.
    cases: int = 0  # the number of cases of the stage
    rank: int = 0
    card: str = ""
    commit: str = ""
    at: float = 0.0  # seconds since 1970

    @property
    def median(self) -> float:
        """The median reading, in seconds; NaN without readings."""
        return statistics.median(self.readings) if self.readings else float("nan")

    def text(self) -> str:
        """A line for people."""
        words = [self.stage, self.name]
        if self.readings:
            words.append(f"{1e3 * self.median:.3f} ms")
        if self.bytes and self.readings:
            words.append(f"{self.bytes / self.median / 1e9:,.0f} GB/s")
        if self.flops and self.readings:
            words.append(f"{self.flops / self.median / 1e12:,.0f} TFLOP/s")
        if self.peak:
            words.append(f"{self.peak / 1e9:.2f} GB")
        numbers = [(n, x) for n, x in self.values.items() if isinstance(x, int | float)]
        words += [
            f"{name} {x:.5g}" if isinstance(x, float) else f"{name} {x}" for name, x in numbers
        ]
        words += [self.note, self.wrong and f"WRONG: {self.wrong}"]
        words.append(self.error and f"FAILED: {self.error}")
        return ": ".join(word for word in words if word)


def shown_number(value: Any) -> str:
    """A number, or something else, as text for people."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


class Case(NamedTuple):
    """A case: a name, a function that returns fields of the result, and the fields known before.

    The function is called on all ranks of the stage. It must wait for the device itself, and raise
    only where it has no result: that ends the process of the stage on all ranks.
    """

    name: str
    measure: Callable[[], dict[str, Any]]
    known: Result = Result()


class Worker(NamedTuple):
    """The files of a rank's process in a stage, and how it waits for the other ranks.

    Attributes:
        stage: the name of the stage.
        rank: the rank of the process.
        results: the file to which it appends results.
        begun: the file to which it appends the names of cases, when they begin.
        skipped: cases of earlier processes of the stage.
        meet: waits until all ranks have called it with the same text.
    """

    stage: str
    rank: int
    results: Path
    begun: Path
    skipped: frozenset[str]
    meet: Callable[[str], None]

    def run(self, cases: Iterable[Case]) -> None:
        """Run the cases that are not skipped.

        Raises:
            BaseException: what a case raised, whose result has been appended.
        """
        cases = [*cases]
        identity: dict[str, Any] = {"stage": self.stage, "rank": self.rank, "cases": len(cases)}
        identity |= {"card": card(), "commit": commit()}
        for case in cases:
            if case.name in self.skipped:
                continue
            self.meet(case.name)
            with self.begun.open("a") as file:
                file.write(f"{case.name}\n")
            known = dataclasses.replace(case.known, name=case.name, **identity)
            try:
                result = dataclasses.replace(known, **case.measure(), at=time.time())
            except BaseException as error:  # torch, Triton and the compiler raise many types
                result = dataclasses.replace(known, error=shown(error), at=time.time())
                append(self.results, result)
                raise
            append(self.results, result)
            print(result.text(), flush=True)


def append(path: Path, *results: Result) -> None:
    """Append lines in one write, so that lines of several processes do not mix.

    A newline comes first, in case a stopped process has left an unfinished line.
    """
    lines = "\n".join(json.dumps(dataclasses.asdict(result)) for result in results)
    with path.open("ab", buffering=0) as file:
        file.write(f"\n{lines}\n".encode())


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


def shown(error: BaseException) -> str:
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
