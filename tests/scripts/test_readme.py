"""The README's table and size, and public names."""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from ranks import RankPool
from torch.distributed.tensor import parallel

import fp8_dist
from fp8_dist import tensor_parallel
from scripts.common.candidates import TORCHAO
from scripts.plan.__main__ import parse_args
from scripts.plan.run import plans_of
from scripts.plan.step import PEER, Plan, make_mesh, run_step
from scripts.plan.world import fake_world

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def planned(command: str) -> list[tuple[str, ...]]:
    """By plan, the GB sent within and between nodes, and in memory; replaces the default group."""
    dist.destroy_process_group()
    plans = plans_of(parse_args(command.split()))
    with fake_world(plans[0].ranks):
        return [gigabytes(plan) for plan in plans]


def gigabytes(plan: Plan) -> tuple[str, ...]:
    """The GB for all blocks, extrapolated from plans with one and two blocks."""
    sizes = []
    for blocks in (1, 2):
        part = replace(plan, model=replace(plan.model, n_layers=blocks))
        step = run_step(part, make_mesh(part), fake_tensors=True)
        sent = (sum(getattr(row, how) for row in step.collectives) for how in ("within", "between"))
        sizes.append((*sent, sum(step.memory.values())))
    totals = [
        one + (plan.model.n_layers - 1) * (two - one) for one, two in zip(*sizes, strict=True)
    ]
    return tuple(f"{total / 1e9:.1f}" for total in totals)


def test_the_table_has_the_figures_of_its_commands() -> None:
    by_command = []
    for command in re.findall(r"^    python -m scripts\.plan (.*)$", README, re.MULTILINE):
        pool = RankPool(1)  # a process for this world alone
        try:
            by_command.append(pool.run(planned, command, timeout=300)[0])
        finally:
            pool.close()
    table = re.findall(r"^\|[^|]+\| \d.*$", README, re.MULTILINE)
    bf16, torchao, ours, encoded = ([n.strip() for n in row.split("|")[2:8]] for row in table)
    peers = [torchao] if PEER in TORCHAO else []  # torchao is an optional extra
    found = []
    for dp, (within, between, _), tp in zip(*by_command, strict=True):
        found.append([dp[0], within, between, tp[0], dp[2], tp[2]])
        assert dp[1] == tp[1] == "0.0"
    assert found == [ours, bf16, *peers, encoded]


def test_the_page_and_its_examples_are_short() -> None:
    assert len(README.splitlines()) <= 100
    for example in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        lines = [line for line in example.splitlines() if line and "import" not in line]
        assert len(lines) <= 12


def test_the_alias_of_torchao() -> None:
    ours = fp8_dist.precompute_float8_dynamic_scale
    assert fp8_dist.precompute_float8_dynamic_scale_for_fsdp is ours
    for name in fp8_dist.__all__:
        assert hasattr(fp8_dist, name)


def test_constructor_arguments_of_torch_are_taken() -> None:
    for ours, theirs in (
        (tensor_parallel.Float8ColwiseParallel, parallel.ColwiseParallel),
        (tensor_parallel.Float8RowwiseParallel, parallel.RowwiseParallel),
        (tensor_parallel.PrepareFloat8ModuleInput, parallel.PrepareModuleInput),
    ):
        known = inspect.signature(ours).parameters
        for name, parameter in inspect.signature(theirs).parameters.items():
            assert known[name].default == parameter.default
