"""Frozen weights beside trained ones: one amax and one cast as long as nothing changes them."""

from collections.abc import Callable, Iterable
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from gpu_shards import as_on_a_gpu
from nets import Distributed, full
from ranks import RankPools, device_mesh
from reference import same_bits
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate

from fp8_dist import (
    Float8LinearConfig,
    attach_update,
    convert_to_float8_training,
    float8_layers,
    invalidate_float8_scales,
    update_float8_scales,
)
from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import local_amaxes, precompute, shard_casts
from fp8_dist.linear.weight_cache import WeightCache
from fp8_dist.tensor_parallel import Float8ColwiseParallel, apply_tp_plan


def world_of(dp: int = 2, tp: int = 1, hidden: int = 96, recipe: str = "tensorwise") -> Distributed:
    """The second block is frozen, as the base beside trained adapters."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    world = Distributed(dp, tp, config=config, net_arguments={"hidden": hidden})
    world.net.layers[1].requires_grad_(False)
    return world


class Counts:
    """How many weights have their amax taken, and how many shards are cast together."""

    def __init__(self) -> None:
        self.amaxes = self.casts = 0

    def take(self) -> tuple[int, int]:
        taken = self.amaxes, self.casts
        self.amaxes = self.casts = 0
        return taken

    def patched(self, run: Callable[[], None]) -> None:
        amax_of_each, quantize_each = local_amaxes.amax_of_each, shard_casts.quantize_each

        def counting_amax(first: Tensor, others: Iterable[Tensor], *args: bool) -> Tensor:
            self.amaxes += 1 + len(list(others))
            return amax_of_each(first, others, *args)

        def counting_cast(first: Tensor, others: Iterable[Tensor], *args: object) -> Tensor:
            self.casts += 1 + len(list(others))
            return quantize_each(first, others, *args)

        with (
            as_on_a_gpu(),
            patch.object(local_amaxes, "amax_of_each", counting_amax),
            patch.object(shard_casts, "quantize_each", counting_cast),
        ):
            run()


def train(world: Distributed, optimizer: torch.optim.Optimizer, batches: int = 2) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(batches):
        x = world.mine(torch.randn(6, 8, 64, generator=generator))
        world.net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluate(world: Distributed) -> None:
    with torch.no_grad():
        world.net(world.mine(torch.randn(6, 8, 64)))


def counted_steps(dp: int, tp: int, hidden: int) -> list[tuple[int, int, int]]:
    """Amaxes, casts and elements all-reduced in each step; all parameters are the optimizer's."""
    world, counts = world_of(dp, tp, hidden), Counts()
    optimizer = torch.optim.AdamW(world.net.parameters(), lr=1e-2)
    found = []

    def run() -> None:
        for _ in range(4):
            with comm_audit() as audit:
                update_float8_scales(world.net)
            train(world, optimizer)
            elements = sum(row.elements * row.count for row in audit.rows)
            found.append((*counts.take(), elements))

    counts.patched(run)
    return found


@pytest.mark.parametrize(("dp", "tp", "hidden"), [(2, 1, 96), (3, 1, 100), (2, 2, 96)])
def test_one_amax_and_one_cast(ranks: RankPools, dp: int, tp: int, hidden: int) -> None:
    found = ranks(dp * tp).run_same(counted_steps, dp, tp, hidden)
    assert found == [(6, 6, 6), (3, 3, 3), (3, 3, 3), (3, 3, 3)]


def trained(recipe: str, leaves_out: bool) -> list[Tensor]:
    """Weights after some steps, with an evaluation between them."""
    world = world_of(3, 1, 100, recipe)
    optimizer = torch.optim.AdamW(world.net.parameters(), lr=1e-2)
    attach_update(optimizer, world.net)
    update_float8_scales(world.net)
    outlives = WeightCache.outlives_steps if leaves_out else lambda *args: False
    with as_on_a_gpu(), patch.object(WeightCache, "outlives_steps", outlives):
        for step in range(4):
            train(world, optimizer)
            if step == 2:
                evaluate(world)
    return [full(p.detach()).clone() for p in world.net.parameters()]


def both_ways(recipe: str) -> bool:
    return all(map(same_bits, trained(recipe, True), trained(recipe, False)))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_folded"])
def test_the_same_training(ranks: RankPools, recipe: str) -> None:
    assert all(ranks(3).run(both_ways, recipe))


def multiply(world: Distributed) -> None:
    with torch.no_grad():
        for parameter in world.net.parameters():
            parameter.mul_(10)


def multiply_local(world: Distributed) -> None:
    with torch.no_grad():
        for parameter in world.net.parameters():
            parameter.to_local().mul_(10)


def load(world: Distributed) -> None:
    world.net.load_state_dict({k: v * 10 for k, v in world.net.state_dict().items()})


def average_unnoticed(world: Distributed) -> None:
    """As a teacher's weights, which no gradient sees, are averaged by foreach operations."""
    evaluate(world)
    torch._foreach_mul_([p.detach() for p in world.net.parameters()], 10.0)


def write_and_invalidate(world: Distributed) -> None:
    torch._foreach_mul_([p.detach() for p in world.net.parameters()], 10.0)
    invalidate_float8_scales(world.net)


def step_with_gradients(world: Distributed) -> None:
    """A weight that is frozen before its last gradient was used."""
    parameters = list(world.net.parameters())
    world.net.requires_grad_(True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    world.net.requires_grad_(False)
    torch.optim.SGD(parameters, lr=10.0, foreach=True).step()


CHANGES = [multiply, multiply_local, load, average_unnoticed, write_and_invalidate]
CHANGES += [step_with_gradients]


def after(change: Callable[[Distributed], None]) -> tuple[list[str], int]:
    """After a change of all weights and an update: wrong casts, amax all-reduces of a forward."""
    world = world_of()
    optimizer = torch.optim.SGD([p for p in world.net.parameters() if p.requires_grad], lr=0.1)
    wrong: list[str] = []
    with as_on_a_gpu():
        for _ in range(2):
            update_float8_scales(world.net)
            train(world, optimizer)
        change(world)
        update_float8_scales(world.net)
        with comm_audit() as audit:
            wrong += world.wrong_casts(lambda: evaluate(world))
    return wrong, audit.count("all_reduce")


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_cast_anew(
    ranks: RankPools, change: Callable[[Distributed], None]
) -> None:
    assert ranks(2).run_same(after, change) == ([], 0)


def buffers() -> list[bool]:
    """Whether casts of frozen and of trained weights share memory."""
    world = world_of()
    with as_on_a_gpu(), patch.object(shard_casts, "LARGEST_BUFFER", 2**30):
        update_float8_scales(world.net)
        world.net(world.mine(torch.randn(6, 8, 64)))
    storages: list[set[int]] = [set(), set()]
    for layer in float8_layers(world.net).values():
        float8 = layer.float8_weight.cache.float8
        assert float8 is not None
        (copy,) = float8.values()
        storages[layer.weight.requires_grad].add(copy.qdata.untyped_storage().data_ptr())
    return [len(each) == 1 for each in storages] + [storages[0].isdisjoint(storages[1])]


def test_casts_of_frozen_weights_have_a_buffer_of_their_own(ranks: RankPools) -> None:
    assert ranks(2).run_same(buffers) == [True] * 3


def groups_of_updates() -> list[object]:
    """The process groups of two updates; the frozen weight alone is on a tensor-parallel axis."""
    torch.manual_seed(0)
    mesh = device_mesh(dp=2, tp=2)
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(net, config=config)
    apply_tp_plan(net, mesh["tp"], {"0": Float8ColwiseParallel(output_layouts=Replicate())})
    net[0].requires_grad_(False)
    fully_shard(net, mesh=mesh["dp"])
    found = []
    common_groups = precompute.common_groups

    def noted(axes: object) -> object:
        found.append(common_groups(axes).groups)  # type: ignore[arg-type]
        return common_groups(axes)  # type: ignore[arg-type]

    with patch.object(precompute, "common_groups", noted):
        for _ in range(2):
            update_float8_scales(net)
            net(torch.ones(4, 32)).sum().backward()
            assert net[0].float8_weight.cache.outlives_steps(net[0].weight)
    return found


def test_the_groups_of_the_first_update_serve_later_ones(ranks: RankPools) -> None:
    first, second = ranks(4).run(groups_of_updates)[0]
    assert first == second


def casts_of_a_plain_weight() -> int:
    """Casts of a frozen weight on one device in three steps of an adapter's optimizer."""
    base = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32, bias=False)))
    base.requires_grad_(False)
    adapter = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
    found = set()
    for _ in range(3):
        x = torch.randn(4, 32)
        base(adapter(x)).sum().backward()
        float8 = base[0].float8_weight.cache.float8
        assert float8 is not None
        found.add(id(float8))
        optimizer.step()
    return len(found)


def test_a_plain_frozen_weight_is_cast_once() -> None:
    assert casts_of_a_plain_weight() == 1
