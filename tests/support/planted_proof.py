"""Run `scripts.prove` with planted faults: `torchrun ... planted_proof.py FAULTS [OPTIONS]`.

FAULTS are names of the functions below, joined by commas. Only a few cases are run.
"""

import dataclasses
import os
import signal
import sys
import time
from typing import Any
from unittest.mock import patch

import pytest
from recordings import corrupt_gathers

from scripts.plan import step
from scripts.prove import __main__ as prove
from scripts.prove import checks, runner, stages

RANK = int(os.environ["RANK"])
operands = checks.operands


def change(recipe: str, action: Any) -> None:
    """Call a function on rank 1 before a recipe's operands are checked in eager code."""
    before = checks.operands

    def changed(name: str, axes: Any, compiled: bool, place: Any) -> Any:
        if name == recipe and RANK == 1 and not compiled:
            action()
        return before(name, axes, compiled, place)

    checks.operands = changed


def wrong_bit() -> None:
    """Flip a bit of a gathered weight on rank 1."""
    change("tensorwise", lambda: corrupt_gathers("bit", (512, 256), pytest.MonkeyPatch()))


def wrong_byte() -> None:
    """Reduce gradients in bf16. (The plan is made in a process without this.)"""
    build = step.build
    step.build = lambda *args, **options: build(
        *args, **options, reduce_dtype=checks.torch.bfloat16
    )


def wrong_byte_of_one_rank() -> None:
    """Report another count of collectives on rank 1."""
    run, here = checks.run_step, RANK == 1

    def changed(*args: Any, **options: Any) -> Any:
        found = run(*args, **options)
        found.collectives = [row._replace(count=row.count + here) for row in found.collectives]
        return found

    checks.run_step = changed


def wrong_sum() -> None:
    """Train faster on two ranks than on one."""

    class Faster(checks.Trainer):
        def learning_rate(self, step: int) -> float:
            return super().learning_rate(step) * self.args.dp

    checks.Trainer = Faster


def wrong_compiled() -> None:
    """Change what a compiled model computes."""
    build = checks.build

    def changed(*args: Any, compiled: Any, **options: Any) -> Any:
        model = build(*args, compiled=compiled, **options)
        if compiled:
            model.register_forward_hook(lambda module, inputs, output: output * 1.5)
        return model

    checks.build = changed


def crash() -> None:
    """End rank 1 by a signal."""
    change("rowwise_folded", lambda: os.kill(os.getpid(), signal.SIGSEGV))


def hang() -> None:
    """Stop rank 1."""
    change("blockwise", lambda: time.sleep(1000))


def old_driver() -> None:
    """Let rank 1 find a GPU that it can't use. (Builds of torch for CPUs can't use any.)"""
    if RANK == 1:
        runner.Runner._device = lambda self: checks.torch.device("cuda", 0)


def count_groups() -> None:
    """Append the number of process groups, and a switch of NCCL, to a file after each training."""
    before = checks.trained

    def changed(*args: Any) -> Any:
        found = before(*args)
        if RANK == 0:
            with open(os.environ["GROUPS"], "a") as file:
                groups = len(checks.dist.distributed_c10d._world.pg_map)
                print(groups, os.environ.get("NCCL_NVLS_ENABLE"), file=file)
        return found

    checks.trained = changed


def no_facts() -> None:
    """Raise in a stage that checks nothing, before its first case."""
    stages.STAGES["facts"] = dataclasses.replace(stages.STAGES["facts"], run="checks:nothing")


def no_loss() -> None:
    """Let a stage that checks nothing hang before its first case."""
    checks.hang = lambda *_: time.sleep(1000)
    loss = dataclasses.replace(stages.STAGES["loss"], run="checks:hang", patience=2)
    stages.STAGES["loss"] = loss


if __name__ == "__main__":
    checks.OURS, checks.PACKED = ("tensorwise", "rowwise_folded", "blockwise", "mxfp8"), ()
    checks.SUMS = {"tensorwise": "float8"}
    checks.meshes = lambda ranks: {f"FSDP2 {ranks}": {"dp": ranks, "tp": 1}}
    stages.STAGES["bits"] = dataclasses.replace(stages.STAGES["bits"], patience=25)
    for fault in filter(None, sys.argv[1].split(",")):
        globals()[fault]()
    with patch.object(sys, "argv", ["prove", *sys.argv[2:]]):
        sys.exit(prove.main())
