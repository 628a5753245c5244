"""Shards that the first gather casts together, as on a GPU: the bits of those cast one by one."""

import dataclasses
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from gpu_shards import as_on_a_gpu
from nets import Distributed, full, full_state
from ranks import RankPools, device_mesh
from reference import same_bits, sqnr, weights_used
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

from fp8_dist import (
    Float8LinearConfig,
    attach_update,
    convert_to_float8_training,
    update_float8_scales,
)
from fp8_dist.fsdp import gathers
from fp8_dist.linear import float8_layers, weight
from fp8_dist.linear.module import Float8Linear
from fp8_dist.mesh import local_tensor


def gathered_alone(net: nn.Module, run: Callable[[], object]) -> int:
    """How many shards gathers cast in a run."""
    with patch.object(weight, "cast_by", wraps=weight.cast_by) as by:
        run()
    return by.call_count


def world_of(recipe: str, dp: int, tp: int, hidden: int, cache: bool = True) -> Distributed:
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, cache_float8_shards=cache)
    return Distributed(dp, tp, config=config, net_arguments={"hidden": hidden})


def trained(recipe: str, dp: int, tp: int, hidden: int) -> tuple[list[Tensor], int]:
    """Weights and gradients of two steps; how many shards gathers cast."""
    world = world_of(recipe, dp, tp, hidden)
    optimizer = torch.optim.AdamW(world.net.parameters(), lr=1e-2)
    attach_update(optimizer, world.net)
    update_float8_scales(world.net)
    seen: list[Tensor] = []

    def steps() -> None:
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            for _ in range(2):  # micro-batches
                x = world.mine(torch.randn(6, 8, 64, generator=generator))
                world.net(x).square().mean().backward()
            seen.extend(full(p.grad).clone() for p in world.net.parameters())
            optimizer.step()
            optimizer.zero_grad()

    cast = gathered_alone(world.net, steps)
    return [*seen, *(full(p.detach()).clone() for p in world.net.parameters())], cast


def both_ways(recipe: str, dp: int, tp: int, hidden: int) -> tuple[bool, int, int]:
    alone, before = trained(recipe, dp, tp, hidden)
    with as_on_a_gpu():
        together, after = trained(recipe, dp, tp, hidden)
    return all(map(same_bits, together, alone)), before, after


@pytest.mark.parametrize(
    ("recipe", "dp", "tp", "hidden"),
    [
        ("tensorwise", 2, 2, 96),
        # 100 rows are uneven on three ranks.
        ("rowwise_folded", 3, 1, 100),
        ("rowwise_folded", 2, 1, 96),
        ("blockwise", 3, 1, 100),
        ("mxfp8", 2, 1, 96),
    ],
)
def test_training(ranks: RankPools, recipe: str, dp: int, tp: int, hidden: int) -> None:
    # Six weights, two steps.
    assert ranks(dp * tp).run(both_ways, recipe, dp, tp, hidden) == [(True, 12, 0)] * (dp * tp)


def evaluate(net: nn.Module) -> None:
    with torch.no_grad():
        net(torch.ones(1, 8, 64))


def multiply(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(10)


def multiply_local(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.to_local().mul_(10)


def gather_first_block(net: nn.Module) -> None:
    block = net.layers[0]
    assert isinstance(block, FSDPModule)
    block.unshard()
    block.reshard()


def evaluated_after_unnoticed_writes() -> tuple[list[str], list[int]]:
    """Wrong casts in two evaluations, and how many shards each of them casts alone, and together.

    (The writes change signs, so that the precomputed scales hold.)
    """
    world = world_of("tensorwise", 2, 1, 96)
    update_float8_scales(world.net)
    x = world.mine(torch.randn(2, 8, 64))
    world.net(x).sum().backward()
    world.net.eval()
    wrong, counts = [], []
    for _ in range(2):
        for layer in float8_layers(world.net).values():
            layer.float8_weight.shard().data.mul_(-1)
        with patch.object(gathers, "_cast_alike", wraps=gathers._cast_alike) as together:
            alone = gathered_alone(
                world.net, lambda: wrong.extend(world.wrong_casts(lambda: evaluate(world.net)))
            )
        counts += [alone, sum(len(call.args[0]) for call in together.call_args_list)]
    return wrong, counts


def evaluated_as_on_a_gpu() -> tuple[list[str], list[int]]:
    with as_on_a_gpu():
        return evaluated_after_unnoticed_writes()


def test_an_evaluation_casts_all_shards_anew_together(ranks: RankPools) -> None:
    assert ranks(2).run(evaluated_after_unnoticed_writes) == [([], [6, 0, 6, 0])] * 2
    assert ranks(2).run(evaluated_as_on_a_gpu) == [([], [0, 6, 0, 6])] * 2


def changed(change: Callable[[nn.Module], None] | None, gathered: bool) -> list[str]:
    """Wrong casts in a forward after a change.

    gathered: whether the change comes after the first gather, not before.
    """
    world = world_of("tensorwise", 2, 1, 96)
    evaluate(world.net)  # FSDP2 refuses a root that ran as a part before
    with as_on_a_gpu(), torch.no_grad():
        update_float8_scales(world.net)
        if gathered:
            gather_first_block(world.net)
        if change:
            change(world.net)
        return world.wrong_casts(lambda: evaluate(world.net))


@pytest.mark.parametrize(
    ("change", "gathered"),
    [(None, False), (None, True), (multiply, False), (multiply, True), (multiply_local, True)],
)
def test_what_is_stale_is_cast_anew(
    ranks: RankPools, change: Callable[[nn.Module], None] | None, gathered: bool
) -> None:
    assert ranks(2).run(changed, change, gathered) == [[], []]


def used_after_an_unnoticed_write() -> float:
    """The lowest SQNR of the weights in a forward after a write that leaves no trace."""
    world = world_of("tensorwise", 2, 1, 96)
    with as_on_a_gpu(), torch.no_grad():
        update_float8_scales(world.net)
        torch._foreach_mul_(list(world.net.parameters()), 0.5)
        values = full_state(world.net)
        with weights_used(world.net) as used:
            evaluate(world.net)
    found = {f"{name}.weight": weight.dequantize() for name, weight in used.items()}
    return min(sqnr(values[name], weight) for name, weight in found.items())


def test_an_unnoticed_write_before_the_first_gather_is_not_lost(ranks: RankPools) -> None:
    assert min(ranks(2).run(used_after_an_unnoticed_write)) > 25


def kept(net: nn.Module) -> int:
    """How many caches hold a shard in float8."""
    layers: list[Float8Linear] = list(float8_layers(net).values())
    return sum(layer.float8_weight.cache.float8 is not None for layer in layers)


def kept_after_a_gather() -> list[tuple[int, int]]:
    """Shards in float8 after updates of models of several kinds, and after a gather."""

    def both(net: nn.Module, part: nn.Module) -> tuple[int, int]:
        update_float8_scales(part)
        before = kept(net)
        if isinstance(net.layers[0], FSDPModule):
            gather_first_block(net)
        return before, kept(net)

    found = []
    with as_on_a_gpu():
        for recipe, cache in (("tensorwise", True), ("tensorwise", False), ("rowwise", True)):
            net = world_of(recipe, 2, 1, 96, cache).net
            evaluate(net)
            found.append(both(net, net))
        part = world_of("tensorwise", 2, 1, 96).net
        evaluate(part)
        found.append(both(part, part.layers[0]))
        # FSDP2 does not know yet that the blocks have a root.
        new = world_of("tensorwise", 2, 1, 96).net
        found.append(both(new, new))
        # Nobody gathers these.
        whole = world_of("tensorwise", 1, 2, 96).net
        assert local_tensor(whole.layers[0].w1.weight).dtype is torch.float32
        found.append(both(whole, whole))
    return found


def test_which_shards_are_cast(ranks: RankPools) -> None:
    expected = [(0, 6), (0, 0), (0, 0), (0, 3), (0, 3), (0, 0)]
    assert ranks(2).run_same(kept_after_a_gather) == expected


class Tied(nn.Module):
    """Two layers with one weight, in one FSDP unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def tied_casts() -> list[list[bool]]:
    """Which of two layers with one weight holds a cast of its shard after a step."""
    found = []
    for reverse in (False, True):
        torch.manual_seed(0)
        net = Tied()
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(net, config=config)
        layers: list[nn.Module] = [net.second, net.first] if reverse else [net.first, net.second]
        fully_shard(layers, mesh=device_mesh(dp=2))
        fully_shard(net, mesh=device_mesh(dp=2))
        with as_on_a_gpu():
            update_float8_scales(net)
            net(torch.ones(4, 32)).sum().backward()
        caches = [layer.float8_weight.cache for layer in float8_layers(net).values()]
        found.append([cache.float8 is not None for cache in caches])
    return found


def test_a_shared_shard_is_cast_for_the_layer_that_fsdp_asks(ranks: RankPools) -> None:
    assert ranks(2).run_same(tied_casts) == [[True, False], [False, True]]
