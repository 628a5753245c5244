"""Shards that precompute casts at once, as on a GPU: the bits of those that gathers cast."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from nets import Distributed, full
from ranks import RankPools
from reference import same_bits
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fp8_dist import Float8LinearConfig, attach_update, update_float8_scales
from fp8_dist.fsdp import shard_casts
from fp8_dist.linear import float8_layers, weight
from fp8_dist.linear.module import Float8Linear
from fp8_dist.mesh import AmaxReduction, local_tensor


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """The scales are there when precompute returns, and a launch costs more than a cast."""
    no_block = patch.object(AmaxReduction, "blocks_host", False)
    several = patch.object(shard_casts, "LARGEST_BUFFER", 7000)  # two or three shards
    with no_block, several, patch.object(shard_casts, "fuses_many", lambda x: True):
        yield


def gathered_alone(net: nn.Module, run: Callable[[], object]) -> int:
    """How many shards gathers cast in a run."""
    with patch.object(weight, "copies_by", wraps=weight.copies_by) as by:
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


# 100 rows are uneven on three ranks.
@pytest.mark.parametrize(("dp", "tp", "hidden"), [(2, 1, 96), (3, 1, 100), (2, 2, 96)])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_folded"])
def test_training(ranks: RankPools, recipe: str, dp: int, tp: int, hidden: int) -> None:
    for same, before, after in ranks(dp * tp).run(both_ways, recipe, dp, tp, hidden):
        assert same
        assert before == 12  # six weights, two steps
        assert after == 0


def change_shards(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(10)


def evaluate(net: nn.Module) -> None:
    with torch.no_grad():
        net(torch.ones(1, 8, 64))


def changed_after_precompute(changes: bool) -> list[str]:
    world = world_of("tensorwise", 2, 1, 96)
    evaluate(world.net)  # FSDP2 refuses a root that ran as a part before
    with as_on_a_gpu():
        update_float8_scales(world.net)
    (change_shards if changes else evaluate)(world.net)
    with torch.no_grad():
        return world.wrong_casts(lambda: evaluate(world.net))


@pytest.mark.filterwarnings("ignore:.*changed after precompute.*")
@pytest.mark.parametrize("changes", [True, False])
def test_what_is_stale_is_cast_anew(ranks: RankPools, changes: bool) -> None:
    for wrong in ranks(2).run(changed_after_precompute, changes):
        assert wrong == []


def kept_after_updates() -> list[list[int]]:
    """How many caches hold a shard in float8, after updates of models of several kinds."""

    def kept(net: nn.Module) -> int:
        layers: list[Float8Linear] = list(float8_layers(net).values())
        return sum(layer.float8_weight.cache.float8 is not None for layer in layers)

    found = []
    with as_on_a_gpu():
        for recipe, cache in (("tensorwise", True), ("tensorwise", False), ("rowwise", True)):
            world = world_of(recipe, 2, 1, 96, cache)
            update_float8_scales(world.net)
            found.append(kept(world.net))
        part = world_of("tensorwise", 2, 1, 96).net
        assert isinstance(part.layers[0], FSDPModule)
        update_float8_scales(part.layers[0])
        found.append(kept(part))
        # Nobody gathers these.
        whole = world_of("tensorwise", 1, 2, 96).net
        update_float8_scales(whole)
        assert local_tensor(whole.layers[0].w1.weight).dtype is torch.float32
        found.append(kept(whole))
    return found


def test_which_shards_are_cast(ranks: RankPools) -> None:
    assert ranks(2).run_same(kept_after_updates) == [6, 0, 0, 3, 0]
