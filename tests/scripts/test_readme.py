"""The README's tables and size, and public names."""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from ranks import RankPool
from torch.distributed.tensor import parallel

import fp8_dist
from fp8_dist import tensor_parallel
from scripts.plan.__main__ import parse_args
from scripts.plan.run import plans_of
from scripts.plan.step import PEER, Plan, make_mesh, run_step
from scripts.plan.world import fake_world

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROSE = " ".join(README.split())


def planned(commands: list[str]) -> dict[str, dict[str, str]]:
    """What each plan sends in GB, and the ms; replaces the default group."""
    dist.destroy_process_group()
    plans = [plan for command in commands for plan in plans_of(parse_args(command.split()))]
    with fake_world(plans[0].ranks):
        return {plan.name: figures(plan) for plan in {plan.name: plan for plan in plans}.values()}


def figures(plan: Plan) -> dict[str, str]:
    """The figures for all blocks, extrapolated from plans with one and two blocks."""
    sizes = []
    for blocks in (1, 2):
        part = replace(plan, model=replace(plan.model, n_layers=blocks))
        step = run_step(part, make_mesh(part), fake_tensors=True)
        sent = {n: sum(getattr(r, n) for r in step.collectives) for n in ("within", "between")}
        sizes.append(sent | {"seconds": step.seconds})
    one, two = sizes
    totals = {name: one[name] + (plan.model.n_layers - 1) * (two[name] - one[name]) for name in one}
    ms = f"{totals.pop('seconds') * 1e3:.0f}"
    return {name: f"{total / 1e9:.1f}" for name, total in totals.items()} | {"ms": ms}


def test_the_bytes_are_those_of_the_plan() -> None:
    found = []
    for mesh, reduced in (("dp=8", ""), ("dp=64", ""), ("dp=4,tp=2", " --reduce-transport float8")):
        pool = RankPool(1)  # a process for this world alone
        command = f"--model 8b --mesh {mesh} --gpus-per-node 8 --gradient-transport"
        commands = [f"{command} bf16 --recipe bf16 tensorwise", f"{command} float8{reduced}"]
        try:
            found.append(pool.run(planned, commands, timeout=480)[0])
        finally:
            pool.close()
    node, nodes, tensor = found
    ours = "tensorwise, float8 gradients"
    tensor[ours] = tensor.pop(f"{ours}, float8 in TP")
    names = [f"{name}{how}" for name in ("bf16", "tensorwise") for how in ("", ", bf16 gradients")]
    sent = ((node, "within"), (nodes, "within"), (nodes, "between"), (tensor, "within"))
    rows = [[plans[name][kind] for plans, kind in sent] for name in [*names, ours]]
    for plans in found:  # torchao is an optional extra
        assert plans.get(PEER, plans["tensorwise"])["within"] == plans["tensorwise"]["within"]
    cells = (r" \**([\d.]+)\** \|" * 4).join((r"^\|[^|]+\|", "$"))
    shown = [list(row) for row in re.findall(cells, README, re.MULTILINE)]
    assert shown == rows
    assert all(plan["between"] == "0.0" for plans in (node, tensor) for plan in plans.values())
    assert (
        f"spend {nodes['bf16']['ms']} ms per step on sending with weights in bf16 and gradients in fp32, "
        f"and {nodes[ours]['ms']} ms with both in float8."
    ) in PROSE


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
