"""What the benchmark scripts share: their options, readings of the clock, tables, verdicts, pages.

Candidates take turns, so that what else the machine does meets all of them alike, and medians are
compared. Ratios carry over between machines of a kind, times don't.
"""

import argparse
import ctypes
import importlib.metadata
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "benchmarks.md"
# Orders of accumulation differ between GEMMs, which moves a result by less than this.
TOLERANCE_DB = 0.02
# The second one counts what this process computed, and not what it waited for.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Timed:
    """What the clock sees, and what is done before each run without it."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Check:
    """Something that `--assert` asks for, as a sentence with its figures."""

    sentence: str
    holds: bool


@dataclass
class Report:
    """What a run of a benchmark leaves.

    Attributes:
        page: the file whose sections `--write` replaces.
        sections: text by title.
        data: what `--json` writes.
        checks: what `--assert` looks at.
    """

    page: Path
    sections: dict[str, str] = field(default_factory=dict)
    data: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def finish(self, args: argparse.Namespace) -> int:
        """Prints and writes what the options ask for; returns the exit status."""
        for title, text in self.sections.items():
            print(f"{title}\n\n{text}\n")
        for check in self.checks:
            print(f"{'holds' if check.holds else 'BROKEN'}: {check.sentence}")
        if args.json is not None:
            data = {"machine": machine(args.device, args.threads), "rows": self.data}
            checks = [{"sentence": c.sentence, "holds": c.holds} for c in self.checks]
            args.json.write_text(json.dumps(data | {"checks": checks}, indent=1) + "\n")
        if args.write:
            update_page(self.page, self.sections)
            print(f"written: {self.page}")
        asserted = getattr(args, "asserted", False)
        return 1 if asserted and not all(check.holds for check in self.checks) else 0


def make_parser(
    description: str | None, repeat: int | None = None, page: Path | None = PAGE
) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have.

    Args:
        description: the script's docstring.
        repeat: the default of `--repeat`; None: nothing is timed.
        page: what `--write` writes to; None: there is no such option.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    if repeat is not None:
        add("--repeat", type=positive, default=repeat, help="turns of each candidate; %(default)s")
        clock = "cpu: CPU time of the process, where others use the machine; default: %(default)s"
        add("--clock", choices=CLOCKS, default="wall", help=clock)
    add("--threads", type=positive, default=1, help="of each process on a CPU; %(default)s")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=["cpu", "cuda"], default=kind, help="default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    if page is not None:
        add("--write", action="store_true", help=f"write the sections of docs/{page.name}")
    return parser


def positive(text: str) -> int:
    """The type of options that count something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def shape_type(text: str) -> tuple[int, int, int]:
    """The type of an option: MxKxN."""
    sizes = tuple(int(size) for size in text.split("x"))
    if len(sizes) != 3 or any(size < 1 or size % 16 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text}: expected MxKxN, positive multiples of 16")
    return sizes


def shape_text(shape: Sequence[int]) -> str:
    """A shape as people read it."""
    return " x ".join(map(str, shape))


def start(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options and sets threads and seed; `command` is how to run the script again."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(argv)
    if args.device == "cuda" and getattr(args, "clock", "wall") == "cpu":
        parser.error("--clock cpu does not see what a GPU does: use wall")
    args.device = torch.device(args.device)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    args.command = shlex.join(["python", f"scripts/{parser.prog}", *_without_json(argv)])
    return args


def _without_json(argv: Sequence[str]) -> list[str]:
    """The options but for the file that only this run writes."""
    pairs = zip(["", *argv], argv, strict=False)
    return [word for before, word in pairs if before != "--json" and not word.startswith("--json")]


def medians(
    candidates: Mapping[str, Timed],
    args: argparse.Namespace,
    *,
    warm_up: int = 1,
    calls: int = 1,
    description: str = "",
) -> dict[str, float]:
    """Median seconds of a run of each candidate, in turns.

    In a process group every rank calls it with the same candidates: all ranks start each run
    together, and a reading is that of the slowest.

    Args:
        candidates: by name.
        args: the options: number of turns, clock, device.
        warm_up: turns before those that count.
        calls: runs in each turn, whose mean is one reading.
        description: of the progress bar.
    """
    keep_freed_memory()
    readings: dict[str, list[float]] = {name: [] for name in candidates}
    others = dist.is_initialized() and dist.get_rank() > 0
    turns = tqdm(
        range(warm_up + args.repeat),
        desc=description,
        unit="turn",
        disable=True if others else None,
        leave=False,
    )
    for turn in turns:
        for name, candidate in candidates.items():
            seconds = sum(seconds_of(candidate, args) for _ in range(calls)) / calls
            if turn >= warm_up:
                readings[name].append(seconds)
    return {name: statistics.median(values) for name, values in _slowest(readings).items()}


def keep_freed_memory() -> None:
    """What is freed stays with this process, where glibc allocates; as other allocators have it.

    It would be given back and asked for again, at some microseconds a page, by candidates that were
    lucky or not in the sizes of what others had freed before.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # of malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**25)  # the most that it accepts


def seconds_of(candidate: Timed, args: argparse.Namespace) -> float:
    """What the clock says of one run."""
    clock = CLOCKS[args.clock]
    candidate.before()
    if args.device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    begin = clock()
    candidate.run()
    if args.device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - begin


def _slowest(mine: dict[str, list[float]]) -> dict[str, list[float]]:
    """The readings of the slowest rank, turn by turn."""
    if not dist.is_initialized():
        return mine
    everyone: list[dict[str, list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return {
        name: list(map(max, zip(*(each[name] for each in everyone), strict=True))) for name in mine
    }


def sqnr(exact: torch.Tensor, found: torch.Tensor) -> float:
    """20 log10(|exact| / |exact - found|) in fp64; inf where they are equal."""
    exact, found = exact.double(), found.double()
    noise = (exact - found).norm().item()
    return math.inf if noise == 0 else 20 * math.log10(exact.norm().item() / noise)


def milliseconds(seconds: float) -> str:
    """Three significant digits, or all before the point."""
    value = 1e3 * seconds
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{max(0, digits)}f}"


def ratio(numerator: float | None, denominator: float | None) -> str:
    """A cell with a ratio; empty where there is nothing to compare."""
    return "" if numerator is None or denominator is None else f"{numerator / denominator:.2f}x"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned; the first line is its head.

    Columns without any cell are left out.
    """
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    rows = [list(row) for row in zip(*columns, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        f"| {' | '.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))} |"
        for row in rows
    )


def machine(device: torch.device, threads: int) -> str:
    """The device, its threads, and the releases of what is measured."""
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device)
    else:
        kind = f"{_cpu_name()}, {os.cpu_count()} cores, {threads} thread{'s' * (threads > 1)}"
    releases = [f"torch {torch.__version__}"]
    try:
        releases.append(f"torchao {importlib.metadata.version('torchao')}")
    except importlib.metadata.PackageNotFoundError:
        releases.append("no torchao")
    return ", ".join([kind, *releases])


def _cpu_name() -> str:
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.machine()


def section(args: argparse.Namespace, about: str, *blocks: str) -> str:
    """The text of a section: how it was made and where, then tables and remarks."""
    made = f"`{args.command}` on {machine(args.device, args.threads)}."
    return "\n\n".join([made, about, *blocks])


def update_page(page: Path, sections: Mapping[str, str]) -> None:
    """Replaces sections of a page, whose others stay; they are sorted by title."""
    known: dict[str, str] = {}
    if page.exists():
        for part in page.read_text().split("\n## ")[1:]:
            name, _, body = part.partition("\n")
            known[name] = body.strip()
    known |= {name: text.strip() for name, text in sections.items()}
    head = "<!-- Each section was written by the command that it names. -->\n\n"
    head += f"# {page.stem.capitalize()}\n"
    body = "".join(f"\n## {name}\n\n{known[name]}\n" for name in sorted(known))
    page.write_text(head + body)
