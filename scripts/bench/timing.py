"""Readings of the clock: candidates take turns, and medians are compared.

What else the machine does then meets all candidates alike. Ratios carry over between machines of a
kind, times don't.
"""

import argparse
import ctypes
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tqdm import tqdm

from scripts.common.report import Check

# The second one counts what this process computed, and not what it waited for.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
# Orders of accumulation differ between GEMMs, which moves a result by less than this.
TOLERANCE_DB = 0.02


@dataclass(frozen=True)
class Timed:
    """What is timed, and what is done before each run outside of the clock."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None


def medians(
    candidates: Mapping[str, Timed],
    args: argparse.Namespace,
    *,
    warm_up: int = 1,
    calls: int = 1,
    description: str = "",
) -> dict[str, float]:
    """Median seconds of a run of each candidate.

    In a process group every rank calls it with the same candidates: all ranks start each run
    together, and a reading is that of the slowest.

    Args:
        candidates: by name.
        args: the options of `make_parser`.
        warm_up: turns before those that count.
        calls: runs in each turn, whose mean is one reading.
        description: of the progress bar.
    """
    _keep_freed_memory()
    readings: dict[str, list[float]] = {name: [] for name in candidates}
    silent = True if dist.is_initialized() and dist.get_rank() > 0 else None
    turns = range(warm_up + args.repeat)
    for turn in tqdm(turns, desc=description, unit="turn", disable=silent, leave=False):
        for name, candidate in candidates.items():
            seconds = sum(_seconds_of(candidate, args) for _ in range(calls)) / calls
            if turn >= warm_up:
                readings[name].append(seconds)
    return {name: statistics.median(values) for name, values in _slowest(readings).items()}


def _keep_freed_memory() -> None:
    """Tells glibc not to return freed memory to the system, as other allocators do.

    Whether a candidate pays for asking again depends on what the others freed before it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # of malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**25)  # the most that it accepts


def _seconds_of(candidate: Timed, args: argparse.Namespace) -> float:
    """The time of one run."""
    clock = CLOCKS[args.clock]
    synchronize = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    candidate.before()
    synchronize()
    if dist.is_initialized():
        dist.barrier()
    begin = clock()
    candidate.run()
    synchronize()
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


def milliseconds(seconds: float | None) -> str:
    """A cell: three significant digits, or all before the point; empty for None."""
    if seconds is None:
        return ""
    value = 1e3 * seconds
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{max(0, digits)}f}"


def ratio(numerator: float | None, denominator: float | None) -> str:
    """A cell with a ratio; empty where there is nothing to compare."""
    return "" if numerator is None or denominator is None else f"{numerator / denominator:.2f}x"


def check_faster(what: str, ours: float, theirs: float | None, least: float) -> Check:
    """The condition that ours is faster than torchao's, whose seconds are None without torchao."""
    if theirs is None:
        return Check(f"{what}: torchao is installed", False)
    faster = theirs / ours
    return Check(f"{what}: {faster:.2f}x faster than torchao, at least {least:g}", faster >= least)


def shape_type(text: str) -> tuple[int, int, int]:
    """The type of an option: MxKxN."""
    sizes = tuple(int(size) for size in text.split("x"))
    if len(sizes) != 3 or any(size < 1 or size % 16 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text}: expected MxKxN, positive multiples of 16")
    return sizes


def shape_text(shape: Sequence[int]) -> str:
    """A shape as people read it."""
    return " x ".join(map(str, shape))
