"""Micro-batches that use different parameters of one FSDP2 group: heads, adapters, experts."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from captures import captured
from delayed_steps import DELAYED, GATHERED, amaxes, delayed
from gradient_wire import nodes_of
from one_sum import Weights, differing, optimizer_of, sums
from ranks import RankPools, device_mesh
from reference import raised
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fp8_dist import (
    Float8LinearConfig,
    attach_update,
    convert_to_float8_training,
    float8_layers,
)
from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import micro_batches, set_gradient_transport

DIM = 40
NO_ADAPTER, SPARE = 2, 3
# The tasks of the micro-batches of each step.
STEPS = ((0, NO_ADAPTER, 1, 1, 0), (NO_ADAPTER,) * 3, (1, 0), (0, 0, 1, NO_ADAPTER))


class Block(nn.Module):
    """A frozen layer, with an adapter in fp32 for the first two tasks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM, dtype=dtype).requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        y = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
        return y + self.adapters[task](x) if task != NO_ADAPTER else y


class Branches(nn.Module):
    """Two parameter groups: a task uses one or no adapter of the first, one head of the second."""

    def __init__(self, frozen: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.trunk = nn.Linear(8, DIM)
            self.block = Block(frozen)
            self.heads = nn.ModuleList(nn.Linear(DIM, size) for size in (5, 37, 5, 130))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        return self.heads[task](self.block(self.trunk(x), task))


def sharded(
    mesh: DeviceMesh,
    recipe: str | Float8LinearConfig | None = None,
    frozen: torch.dtype = torch.float32,
    **how: Any,
) -> Branches:
    net = Branches(frozen)
    if isinstance(recipe, str):
        recipe = Float8LinearConfig.from_recipe_name(recipe, enable_fsdp_float8_all_gather="auto")
    if recipe is not None:
        convert_to_float8_training(net, config=replace(recipe, pad_inner_dim=True))
    for module in (net.block, net):
        fully_shard(module, mesh=mesh, **how)
    return net


def loss_of(net: nn.Module, task: int, seed: int, size: float = 1.0) -> torch.Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) * size
    return net(x, task).float().square().sum()


def trained(
    transport: Any,
    recipe: str | None = None,
    policy: Sequence[Any] = (),
    frozen: torch.dtype = torch.float32,
    **how: Any,
) -> tuple[Weights, list[list[str]]]:
    """The weights after some steps, and the parameters that had no gradient in each of them."""
    mesh, unused = device_mesh(dp=dist.get_world_size()), []
    net = sharded(mesh, recipe, frozen, mp_policy=MixedPrecisionPolicy(*policy))
    sums(net)
    set_gradient_transport(net, transport, **how)
    optimizer = optimizer_of(net)
    for step, tasks in enumerate(STEPS):
        for index, weight in micro_batches(len(tasks), mesh):
            (loss_of(net, tasks[index], 10 * step + index) * weight).backward()
        unused.append([name for name, p in net.named_parameters() if p.grad is None])
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() for name, p in net.named_parameters()}, unused


@pytest.mark.parametrize(
    ("transport", "options"),
    [
        ("fp32", {"frozen": torch.bfloat16}),
        ("bf16", {"recipe": "tensorwise", "policy": (torch.bfloat16, torch.float32)}),
        ("float8", {"recipe": "rowwise_folded"}),
        ("fp32", {"recipe": "delayed"}),  # of a shard's amax, also on ranks without the branch
    ],
)
def test_weights_do_not_depend_on_the_number_of_ranks(
    ranks: RankPools, transport: str, options: dict[str, Any]
) -> None:
    expected, unused = ranks(1).run(trained, transport, **options)[0]
    assert [sum("adapters" in name for name in names) for names in unused] == [0, 4, 0, 0]
    assert all("heads.3.weight" in names for names in unused)
    for size in (2, 3):
        for weights, names in ranks(size).run(trained, transport, **options):
            assert differing(expected, weights) == [], size
            assert names == unused, size


def captured_step() -> str:
    """What a captured step raises in which each rank leaves out the adapter of the other."""
    net = sharded(device_mesh(dp=2))
    set_gradient_transport(net, "float8")
    loss = loss_of(net, dist.get_rank(), 0)
    with captured():
        return raised(ValueError, loss.backward)


def test_a_capture_cannot_ask_who_used_a_parameter(ranks: RankPools) -> None:
    for rank, text in enumerate(ranks(2).run(captured_step)):
        left_out = f"block: this rank has no gradient of block.adapters.{1 - rank}.weight, "
        assert text.startswith(f"set_gradient_transport: {left_out}"), text
        assert "capture it without a transport" in text


def trained_on_nodes(transport: str) -> tuple[Weights, list[list[str]]]:
    return trained(transport, nodes=nodes_of(2))


@pytest.mark.parametrize("transport", ["fp32", "float8"])
def test_weights_do_not_depend_on_the_number_of_nodes(ranks: RankPools, transport: str) -> None:
    expected, unused = ranks(2).run(trained_on_nodes, transport)[0]
    assert unused == ranks(1).run(trained, transport)[0][1]
    for weights, names in ranks(4).run(trained_on_nodes, transport):
        assert (differing(expected, weights), names) == ([], unused)


def wrong_histories(config: Float8LinearConfig) -> list[str]:
    """Histories of weights that differ from the amaxes of the steps in which the weight was used.

    In the last step all activations and gradients of the used layers are zeros.
    """
    mesh, wrong = device_mesh(dp=dist.get_world_size()), []
    net = sharded(mesh, config)
    sums(net)
    set_gradient_transport(net, "fp32")
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    attach_update(optimizer, net)
    layers = {n: layer for n, layer in float8_layers(net).items() if layer.weight.requires_grad}
    expected: dict[str, list[torch.Tensor]] = {name: [] for name in layers}
    for step, tasks in enumerate((*STEPS, (1, 0))):
        used = {"trunk", *(f"heads.{task}" for task in tasks)}
        used |= {f"block.adapters.{task}" for task in tasks if task != NO_ADAPTER}
        for name in used:
            expected[name].insert(0, layers[name].weight.full_tensor().abs().amax())
        for index, weight in micro_batches(len(tasks), mesh):
            size = float(step < len(STEPS))
            (loss_of(net, tasks[index], 10 * step + index, size) * size * weight).backward()
        with torch.no_grad():  # leaves no trace
            loss_of(net, NO_ADAPTER, 0)
        optimizer.step()
        optimizer.zero_grad()
    for name, held in amaxes(net).items():
        layer, _, operand = name.rpartition(".")
        if operand == "weight" and layer in layers:
            right = [amax.item() for amax in expected[layer]]
            wrong += [f"{layer}: {held}, not {right}"] * (held != right)
    return wrong


def test_histories_of_weights_that_some_ranks_use(ranks: RankPools) -> None:
    configs = (DELAYED, GATHERED, replace(delayed("weight"), enable_fsdp_float8_all_gather=True))
    for size, config in product((1, 2, 3), configs):
        assert ranks(size).run(wrong_histories, config) == [[]] * size, (size, config)


def wrong_means(
    transport: Any, axes: dict[str, int], syncs: Sequence[bool], per_node: int | None = None
) -> list[str]:
    """What is wrong with the mean of each parameter's gradient over ranks, each with tasks of its own.

    syncs: for each of a rank's micro-batches whether gradients are reduced after it. (Under HSDP,
    over replicas; otherwise FSDP2 accumulates them in reduce_dtype.)
    """
    mesh, rank, wrong = device_mesh(**axes), dist.get_rank(), []
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    net = sharded(mesh, mp_policy=policy)
    set_gradient_transport(net, transport, nodes=per_node and nodes_of(per_node))
    switch = net.set_requires_all_reduce if mesh.ndim > 1 else net.set_requires_gradient_sync
    for i, is_reduced in enumerate(syncs):
        switch(is_reduced)  # type: ignore[operator]
        loss_of(net, (rank + i) % 3, 10 * i + rank).backward()
    single = [gradients_of_rank(each, len(syncs)) for each in range(mesh.size())]
    for name, p in net.named_parameters():
        summands = [grads[name] for grads in single if name in grads]
        if p.grad is None or not summands:
            wrong += [f"{name}: {p.grad}"] * ((p.grad is None) == bool(summands))
            continue
        expected = torch.stack(summands).double().sum(0) / mesh.size()
        error = (p.grad.full_tensor().double() - expected).norm() / expected.norm()
        wrong += [f"{name}: {error:.3f}"] * bool(error > (0.05 if transport == "float8" else 0.01))
    return wrong


def gradients_of_rank(rank: int, count: int) -> Weights:
    """The gradients of a rank's micro-batches, without FSDP2, in the same precision."""
    net, total = Branches(), Weights()
    for i in range(count):
        low = {
            n: p.detach().bfloat16().requires_grad_(p.requires_grad)
            for n, p in net.named_parameters()
        }
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * i + rank)).bfloat16()
        y = torch.func.functional_call(net, low, (x, (rank + i) % 3))
        y.float().square().sum().backward()
        for name, p in low.items():
            if p.grad is not None:
                total[name] = total.get(name, 0) + p.grad.float()
    return total


@pytest.mark.parametrize("transport", ["fp32", "float8"])
def test_means_without_micro_batches(ranks: RankPools, transport: str) -> None:
    for axes, syncs in (
        ({"dp": 2}, (True,)),
        ({"dp": 3}, (False, True, True)),
        ({"replicas": 2, "dp": 2}, (False, True)),
        ({"replicas": 2, "dp": 1}, (True,)),
    ):
        size = 4 if axes == {"replicas": 2, "dp": 2} else sum(axes.values()) - ("replicas" in axes)
        assert ranks(size).run(wrong_means, transport, axes, syncs) == [[]] * size, (axes, syncs)
    for axes in ({"dp": 4}, {"replicas": 2, "dp": 4}):  # on nodes of 2
        size = math.prod(axes.values())
        assert ranks(size).run(wrong_means, transport, axes, (False, True), 2) == [[]] * size, axes


def collectives_of(transport: Any, tasks: Sequence[int]) -> int:
    """The number of collectives in a backward where each rank has a task of its own."""
    mesh = device_mesh(dp=dist.get_world_size())
    net = sharded(mesh)
    set_gradient_transport(net, transport)
    loss = loss_of(net, tasks[dist.get_rank()], 0)
    with comm_audit(mesh) as audit:
        loss.backward()
    return sum(row.count for row in audit.rows)


def test_no_collective_is_added(ranks: RankPools) -> None:
    fsdp2_counts = ranks(2).run_same(collectives_of, None, (0, 0))
    for tasks in ((0, 0), (0, 1), (1, NO_ADAPTER)):
        assert ranks(2).run_same(collectives_of, "float8", tasks) == fsdp2_counts


def reported(asks_for_all: bool) -> tuple[list[str], list[str]]:
    """The parameters that have a gradient of -0, and those of which hooks were called."""
    mesh = device_mesh(dp=dist.get_world_size())
    net, called = sharded(mesh), []
    set_gradient_transport(net, "fp32")
    if asks_for_all:
        net.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    for name, p in net.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p, name=name: called.append(name))
    loss_of(net, 2 * dist.get_rank(), 0).backward()
    grads = {n: p.grad.full_tensor() for n, p in net.named_parameters() if p.grad is not None}
    return [n for n, g in grads.items() if (g.signbit() & (g == 0)).all()], called


def test_parameters_that_no_rank_uses(ranks: RankPools) -> None:
    """Neither a gradient nor a call of hooks, unless FSDP2 is asked for gradients of zero."""
    for size in (1, 2):
        zeros, called = ranks(size).run_same(reported, False)
        assert zeros == []
        assert not [name for name in called if "adapters.1" in name or "heads.3" in name]
        assert "heads.0.bias" in called
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        alone, two = (ranks(size).run_same(reported, True) for size in (1, 2))
        assert alone[1] == two[1]
        assert {"heads.1.bias", "block.adapters.1.weight"} <= {*alone[0]} & {*two[0]}


def step_with_other_modules(*heads: int) -> str:
    """The error when each rank runs the given one of several heads that are sharded separately.

    Four ranks are on two nodes, and six.
    """
    mesh, policy = device_mesh(dp=len(heads)), MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    net = nn.ModuleList(nn.Linear(8, 8) for _ in range(max(heads) + 1))
    for head in net:
        fully_shard(head, mesh=mesh, mp_policy=policy)
    nodes = nodes_of(len(heads) // 2) if len(heads) > 2 else None
    set_gradient_transport(net, "float8", nodes=nodes)
    return raised(ValueError, net[heads[dist.get_rank()]](torch.ones(2, 8)).sum().backward)


def test_modules_that_only_some_ranks_run(ranks: RankPools) -> None:
    first, second = ranks(2).run(step_with_other_modules, 0, 1)
    assert "rank 0 reduces the gradients of 0 while ranks [1] reduce" in first
    assert "rank 1 reduces the gradients of 1 while ranks [0] reduce" in second
    # Within nodes, between nodes, within one of them (all ranks raise), and with equal sums; bf16
    # can't tell 3 x 253 from 3 x 254.
    four = (0, 1, 0, 1), (0, 0, 1, 1), (0, 0, 0, 1), (1, 1, 0, 2)
    for heads in (*four, (253, 253, 253, 254, 254, 254)):
        for rank, found in enumerate(ranks(len(heads)).run(step_with_other_modules, *heads)):
            assert f"rank {rank} reduces the gradients of {heads[rank]} while ranks" in found
