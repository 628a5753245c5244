"""Runs planned steps, each in a process of its own: a fake world can't be left."""

import importlib.metadata
import multiprocessing
import resource
import sys
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from measure_communication import torchao
from plan_precompute import Timed, timed
from plan_step import PEER, PHASES, Measured, Plan, make_mesh, measured_step
from plan_world import fake_world
from tqdm import tqdm

PARTS = ("build", *PHASES)


@dataclass
class Run:
    """A plan and what was measured.

    Attributes:
        plan: what was asked for.
        measured: None where the peer could not be run.
        reason: why it could not.
        peak_bytes: the most memory of the process.
    """

    plan: Plan
    measured: Measured | None
    reason: str = ""
    peak_bytes: int = 0


def run_all(plans: list[Plan], timed_plan: Plan | None, jobs: int) -> tuple[list[Run], Any]:
    """Runs plans, some at a time, and shows their progress.

    Args:
        plans: what to run under fake tensors.
        timed_plan: whose calls between steps to time on real memory, once all else is done; None
            for nothing.
        jobs: processes at a time.

    Returns:
        A run for each plan, in order, and the `Timed`, or sentence, of `timed_plan` (or None).
    """
    # Importing torch takes seconds: one server does, and forks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    begun = context.Queue()
    with (
        tqdm(total=len(plans) * len(PARTS), unit="part", disable=None) as bar,
        ProcessPoolExecutor(
            jobs, context, initializer=_share, initargs=(begun,), max_tasks_per_child=1
        ) as pool,
    ):
        futures = [pool.submit(_run, plan) for plan in plans]
        pending: set[Future[Any]] = set(futures)
        while pending:
            done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()  # an error ends it all
            while not begun.empty():
                bar.set_description(begun.get())
                bar.update()
        time = None
        if timed_plan is not None:
            bar.set_description("timing precompute")
            time = pool.submit(timed, timed_plan).result()
    return [future.result() for future in futures], time


_begun: Any = None


def _share(begun: Any) -> None:
    global _begun
    _begun = begun


def _run(plan: Plan) -> Run:
    """In a process of its own."""
    torch.set_num_threads(1)
    name = f"{plan.variant} on {plan.ranks:,} ranks"
    if plan.variant == PEER and torchao is None:
        for _ in PARTS:
            _begun.put(f"{name}: not installed")
        return Run(plan, None, "torchao is not installed")
    try:
        with fake_world(plan.ranks):
            measured = measured_step(
                plan, make_mesh(plan), True, lambda part: _begun.put(f"{name}: {part}")
            )
    except Exception as error:
        if plan.variant != PEER:
            raise
        return Run(plan, None, f"torchao stopped: {type(error).__name__}: {error}")
    return Run(plan, measured, peak_bytes=_peak_bytes())


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str]:
    """Of what was run."""
    found = {"torch": str(torch.__version__)}
    if torchao is not None:
        found["torchao"] = importlib.metadata.version("torchao")
    return found


__all__ = ["PARTS", "Run", "Timed", "run_all", "versions"]
