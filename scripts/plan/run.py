"""Runs planned steps, each in a process of its own: a fake world can't be left."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
from tqdm import tqdm

from scripts.plan.own_model import Unfit
from scripts.plan.step import PEER, Plan, Step, make_mesh, run_step
from scripts.plan.world import fake_world


def run_all(plans: Sequence[Plan]) -> list[Step | str]:
    """Run each planned step as rank 0 sees it; a text says why torchao could not."""
    # Importing torch takes seconds: one server does, and forks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    jobs = min(os.cpu_count() or 1, 4)
    with ProcessPoolExecutor(jobs, context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(run_fake, plan) for plan in plans]
        for future in tqdm(as_completed(futures), total=len(plans), unit="run", disable=None):
            future.result()  # an error ends it all
        return [future.result() for future in futures]


def run_fake(plan: Plan) -> Step | str:
    """Runs a step in a fake world; called in a process of its own."""
    torch.set_num_threads(1)
    try:
        with fake_world(plan.ranks):
            return run_step(plan, make_mesh(plan), fake_tensors=True)
    except Exception as error:
        if isinstance(plan.model, str):
            kind = type(error).__name__
            raise Unfit(
                f"--model {plan.model}: a step of {plan.variant}: {kind}: {error}"
            ) from None
        if plan.variant != PEER:
            raise
        return f"{PEER} on {plan.ranks:,} ranks stopped: {type(error).__name__}: {error}"
