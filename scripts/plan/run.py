"""Run planned steps, each in its own process, because a process can't leave a fake world."""

import argparse
import logging
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from time import monotonic

import torch

from fp8_dist.text import progress
from scripts.common.candidates import TORCHAO
from scripts.common.recipes import BF16
from scripts.common.report import finish
from scripts.plan.own_model import OwnModel, Unfit
from scripts.plan.pace import about
from scripts.plan.step import PEER, Plan, Step, make_mesh, run_step
from scripts.plan.tables import axes_table, collectives_table, memory_table, summary_table
from scripts.plan.world import fake_world


def run(args: argparse.Namespace) -> int:
    plans = plans_of(args)
    try:
        found = list(zip(plans, run_all(plans), strict=True))
    except Unfit as error:
        print(f"python -m scripts.plan: error: {error}", file=sys.stderr)
        return 2
    for _, reason in found:
        if isinstance(reason, str):
            print(reason, file=sys.stderr)
    runs = [(plan, step) for plan, step in found if isinstance(step, Step)]
    first, step = runs[0]
    mesh = " x ".join(f"{name} {size:,}" for name, size in args.mesh.items())
    blocks = {
        "model": f"{args.model}: {step.parameters:,} parameters, {step.weights} converted weights, "
        f"{step.blocks} blocks; {first.ranks:,} ranks ({mesh}); {args.batch_size} x "
        f"{args.seq_len:,} tokens on each data-parallel rank.",
        "summary": summary_table(runs),
        "axes": axes_table(runs),
        "collectives": collectives_table(runs),
        "memory": memory_table(runs),
    }
    return finish(args, blocks)


def plans_of(args: argparse.Namespace) -> list[Plan]:
    """Plans of the recipes, bf16 and torchao; then of the recipes with the transports, if any."""
    sizes = (args.sizes, args.mesh, args.batch_size, args.seq_len)
    others = [BF16, *([PEER] if PEER in TORCHAO and args.has_peer else [])]
    nodes = (args.gpus_per_node, args.gbps_within, args.gbps_between)
    variants = dict.fromkeys((*args.recipe, *others))
    plans = [Plan(*sizes, variant, None, None, *nodes) for variant in variants]
    for gradients in args.gradient_transport or [None] * bool(args.reduce_transport):
        wire = (gradients, args.reduce_transport)
        plans += [Plan(*sizes, variant, *wire, *nodes) for variant in args.recipe]
    return plans


def run_all(plans: Sequence[Plan]) -> list[Step | str]:
    """Run each planned step as rank 0 sees it. If torchao fails, its result is the reason."""
    # Importing torch takes seconds, so one fork server imports it for all processes.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    jobs = min(os.cpu_count() or 1, 4)
    progress(f"planning {len(plans)} steps, {min(jobs, len(plans))} at a time")
    begin = monotonic()
    with ProcessPoolExecutor(jobs, context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(run_fake, plan) for plan in plans]
        for done, future in enumerate(as_completed(futures), 1):
            future.result()  # the first error ends the run
            left = (monotonic() - begin) / done * (len(plans) - done)
            progress(f"{done} of {len(plans)} steps are planned{about(left)}")
        return [future.result() for future in futures]


def run_fake(plan: Plan) -> Step | str:
    """Run a step in a fake world; called in its own process."""
    torch.set_num_threads(1)
    # An operator that fails on fake tensors also logs the traceback of the error that it raises.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        with fake_world(plan.ranks):
            return run_step(plan, make_mesh(plan), fake_tensors=True)
    except Exception as error:
        if isinstance(plan.model, OwnModel):
            kind = type(error).__name__
            raise Unfit(
                f"--model {plan.model.name}: a step of {plan.variant}: {kind}: {error}\n"
                "A model is given tokens [b, s], and must return logits [b, s, v]"
            ) from None
        if plan.variant != PEER:
            raise
        return f"{PEER} on {plan.ranks:,} ranks stopped: {type(error).__name__}: {error}"
