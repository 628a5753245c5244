"""Benchmarks on this machine: candidates take turns, and their median times are compared.

So other load on the machine affects all candidates alike. Ratios carry over to other machines of
the same kind; times don't.
"""

import argparse
import ctypes
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tqdm import tqdm

from scripts.common import report
from scripts.common.candidates import TORCHAO, peer_of
from scripts.common.markdown import table
from scripts.common.recipes import BF16, OURS

CANDIDATES = (BF16, *OURS, *TORCHAO)
# "cpu" counts the time that this process computes, but not the time that it waits.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Timed:
    """A function to time, and functions to call before and after each run, which are not timed."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


def medians(
    candidates: Mapping[str, Timed],
    args: argparse.Namespace,
    *,
    warm_up: int = 1,
    calls: int = 1,
    description: str = "",
) -> dict[str, float]:
    """The median seconds of a run of each candidate.

    In a process group all ranks must call this with the same candidates. They start each run
    together, and a reading is the time of the slowest rank.

    Args:
        candidates: the functions to time, by name.
        args: the options of `scripts.common.report.make_parser`.
        warm_up: the number of turns that are not measured, at the start.
        calls: the number of runs in each turn; their mean is one reading.
        description: the text of the progress bar.
    """
    _keep_freed_memory()
    readings: dict[str, list[float]] = {name: [] for name in candidates}
    silent = True if dist.is_initialized() and dist.get_rank() > 0 else None
    turns = range(warm_up + args.repeat)
    for turn in tqdm(turns, desc=description, unit="turn", disable=silent, leave=False):
        # Every second turn is in reverse order, so that no candidate always follows the same one.
        for name, candidate in [*candidates.items()][:: -1 if turn % 2 else 1]:
            seconds = sum(_seconds_of(candidate, args) for _ in range(calls)) / calls
            if turn >= warm_up:
                readings[name].append(seconds)
    return {name: statistics.median(values) for name, values in _slowest(readings).items()}


def _keep_freed_memory() -> None:
    """Tell glibc not to return freed memory to the system, like other allocators.

    Otherwise memory that one candidate frees changes the cost of allocations in the next.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # from malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**25)  # the largest value that it accepts


def _seconds_of(candidate: Timed, args: argparse.Namespace) -> float:
    """The seconds of one run."""
    clock = CLOCKS[args.clock]
    synchronize = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    candidate.before()
    synchronize()
    if dist.is_initialized():
        dist.barrier()
    begin = clock()
    candidate.run()
    synchronize()
    seconds = clock() - begin
    candidate.after()
    return seconds


def _slowest(mine: dict[str, list[float]]) -> dict[str, list[float]]:
    """In each turn, the reading of the slowest rank."""
    if not dist.is_initialized():
        return mine
    everyone: list[dict[str, list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return {
        name: list(map(max, zip(*(theirs[name] for theirs in everyone), strict=True)))
        for name in mine
    }


def finish(args: argparse.Namespace, by_title: Mapping[str, Mapping[str, float]]) -> int:
    """Print a table for each title, and the checks of `--assert`; return the exit status.

    by_title: median seconds by candidate. Names may have a suffix, as in "tensorwise, recorded".
    """
    checks = []
    for title, seconds in by_title.items() if args.asserted else ():
        faster = seconds.get("torchao tensorwise", math.nan) / seconds.get("tensorwise", math.nan)
        sentence = f"{title}: {faster:.2f}x as fast as torchao, at least {args.asserted:g}"
        checks.append(report.Check(sentence, faster >= args.asserted))
    tables = {title: seconds_table(seconds) for title, seconds in by_title.items()}
    return report.finish(args, tables, checks)


def seconds_table(seconds: Mapping[str, float]) -> str:
    """A line per candidate, with ratios to bf16, to torchao, and to itself without the suffix."""
    lines = []
    for name, median in seconds.items():
        plain = name.partition(", ")[0]
        without = seconds.get(plain) if plain != name else None
        cells = [ratio(median, seconds.get(BF16)), ratio(seconds.get(peer_of(name) or ""), median)]
        lines.append([name, milliseconds(median), *cells, ratio(median, without)])
    head = ["candidate", "ms", "x bf16", "faster than torchao", "x without the addition"]
    return table(head, lines, "lr")


def milliseconds(seconds: float) -> str:
    """A cell in milliseconds, with three significant digits, or more before the point."""
    value = 1e3 * seconds
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{max(0, digits)}f}"


def ratio(numerator: float | None, denominator: float | None) -> str:
    """A cell with a ratio; empty if there is nothing to compare."""
    return "" if numerator is None or denominator is None else f"{numerator / denominator:.2f}x"
