"""Casts that an update of scales keeps for FSDP2's gathers, beside casts by each gather."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from nets import Distributed, Net, full, sharded_net
from rank_tests import on_ranks
from ranks import device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map_only

from fp8_dist import (
    Float8LinearConfig,
    Float8State,
    convert_to_float8_training,
    float8_layers,
    invalidate_float8_scales,
    update_float8_scales,
)
from fp8_dist.fsdp import weight as fsdp_weight
from fp8_dist.mesh import local_tensor

CONFIGS: dict[str, dict[str, Any]] = {
    "tensorwise": {},
    "delayed": {},
    "rowwise_folded": {},
    "blockwise": {},
    "blockwise fp32": {"scale_format": "fp32"},
    "mxfp8": {},
    "mxfp8 mxfp4": {"weight_format": "mxfp4"},
}


def config_of(name: str, keep: bool) -> Float8LinearConfig:
    recipe, fields = name.split()[0], CONFIGS[name]
    config = Float8LinearConfig.from_recipe_name(recipe, **fields)
    gather: Any = {"enable_fsdp_float8_all_gather": "auto", "keep_fsdp_float8_cast": keep}
    return dataclasses.replace(config, **gather)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count casts of shards."""
    counts = [0]
    cast = fsdp_weight._cast_shard

    def counting(*args: Any) -> Any:
        counts[0] += 1
        return cast(*args)

    with patch.object(fsdp_weight, "_cast_shard", counting):
        yield counts


@torch.no_grad()
def swap_averages(net: Net) -> list[torch.Tensor]:
    """Evaluate other values, as with an exponential moving average, and return what they give."""
    own = {name: p.detach().clone() for name, p in net.named_parameters()}
    for parameter in net.parameters():
        parameter.mul_(0.75)
    out = net(torch.ones(2, 4, 64))
    for name, parameter in net.named_parameters():
        parameter.copy_(own[name])
    return [out]


@torch.no_grad()
def write_to_views(net: Net) -> None:
    for parameter in net.parameters():
        local_tensor(parameter).view(-1)[:8].mul_(3.0)


@torch.no_grad()
def evaluate_unsharded(net: Net) -> list[torch.Tensor]:
    """Evaluate weights that were gathered before a write, then those after it."""
    net.unshard()
    net.layers[0].unshard()
    net.layers[0].reshard()
    for parameter in net.layers[0].parameters():
        parameter.mul_(1.5)
    return [net(torch.ones(2, 4, 64))]


def load(net: Net) -> None:
    net.load_state_dict({name: value * 1.25 for name, value in net.state_dict().items()})


def load_histories(net: Net) -> None:
    state = Float8State(net)
    state.load_state_dict(tree_map_only(float, lambda amax: 3 * amax, state.state_dict()))


def freeze(net: Net) -> None:
    """With a history, a frozen weight has a scale of its own amax."""
    for parameter in net.layers[0].parameters():
        parameter.requires_grad_(False)


def replace_data(net: Net) -> None:
    for parameter in net.parameters():
        local = local_tensor(parameter)
        local.data = local.data * 0.5


CHANGES: list[Callable[[Net], list[torch.Tensor] | None]] = [
    lambda net: None,
    swap_averages,
    write_to_views,
    evaluate_unsharded,
    load,
    load_histories,
    replace_data,
    freeze,
    invalidate_float8_scales,
    update_float8_scales,
]


def steps_of(net: Any, mine: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Any]:
    """Two micro-batches a step, each change after an update; yield what one computes, by name."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    x = mine(torch.randn(6, 4, 64, generator=torch.Generator().manual_seed(1)))
    for number, change in enumerate(CHANGES):
        for micro_batch in range(2):
            out = net(x + micro_batch)
            out.square().mean().backward()
            yield f"{number} {micro_batch}", out.detach().clone()
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                yield f"{number} {name}", full(parameter.grad).clone()
        pending = net.layers[0].unshard(async_op=True) if number == 4 else None
        if number != 2:  # a step that a GradScaler skips
            optimizer.step()
        optimizer.zero_grad()
        update_float8_scales(net)
        if pending is not None:
            pending.wait()
        for i, value in enumerate(change(net) or []):
            yield f"change {number} {i}", value.clone()


def compared(nets: dict[bool, Any], mine: Callable[[torch.Tensor], Any]) -> list[str]:
    """The names of what differs between casts that are kept, and that are not."""
    kept, new = (dict(steps_of(nets[keep], mine)) for keep in (True, False))
    assert kept.keys() == new.keys()
    return [name for name, value in kept.items() if not torch.equal(value, new[name])]


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (3, 1), (2, 2)])
@on_ranks("dp", "tp", returns={})
def test_steps_have_the_bits_of_casts_by_each_gather(dp: int, tp: int) -> dict[str, list[str]]:
    found = {}
    for name in CONFIGS:
        how: Any = {"dp": dp, "tp": tp, "sequence_parallel": False}
        worlds = {keep: Distributed(**how, config=config_of(name, keep)) for keep in (True, False)}
        found[name] = compared({k: world.net for k, world in worlds.items()}, worlds[True].mine)
    return {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize("dp", [1, 2])
@on_ranks(2, returns={})
def test_shards_with_whole_blocks_and_others(dp: int) -> dict[str, list[str]]:
    """Some are cast together; others end inside of a block, or (with dp=1) begin there."""
    found, mesh = {}, device_mesh(dp=dp, tp=2 // dp)
    for name in ("blockwise", "blockwise fp32", "mxfp8", "mxfp8 mxfp4"):
        nets = {k: sharded_net(mesh, config_of(name, k), hidden=320 // dp) for k in (True, False)}
        found[name] = compared(nets, lambda x: x + mesh.get_local_rank("dp"))
    return {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise_folded", "mxfp8"])
@on_ranks(2, returns=[])
def test_values_that_are_not_finite(name: str, value: float) -> list[str]:
    """What all ranks gather of a weight with such a value on one rank, with and without casts."""
    found: dict[bool, list[torch.Tensor]] = {}
    for keep in (True, False):
        world = Distributed(2, 1, config=config_of(name, keep))
        x = world.mine(torch.randn(4, 4, 64, generator=torch.Generator().manual_seed(1)))
        world.net(x).sum().backward()
        update_float8_scales(world.net)
        with torch.no_grad():
            local = local_tensor(world.net.layers[0].w1.weight)
            local[0, 0] = value if dist.get_rank() else 1.0
        world.net.zero_grad()
        update_float8_scales(world.net)
        found[keep] = [world.net(x).isfinite()]
    return [name] if not torch.equal(found[True][0], found[False][0]) else []


@on_ranks(2, returns=[True, False, False])
def test_turning_it_off_frees_the_casts() -> list[bool]:
    world = Distributed(2, 1, config=config_of("tensorwise", True))
    shard: Any = local_tensor(world.net.layers[0].w1.weight)
    update_float8_scales(world.net)
    found = [shard.kept_cast is not None]
    for layer in float8_layers(world.net).values():
        layer.config = dataclasses.replace(layer.config, keep_fsdp_float8_cast=False)
    world.net(world.mine(torch.ones(2, 4, 64)))
    found.append(shard.kept_cast is not None)
    update_float8_scales(world.net)
    return [*found, shard.kept_cast is not None]


class Tied(nn.Module):
    """Two layers with one weight, and a layer of two rows, of which some ranks have none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tied = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        tied[2].weight = tied[0].weight
        self.layers = nn.ModuleList([tied, nn.Linear(64, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))


@pytest.mark.parametrize("mesh", [{"shard": 3}, {"replicate": 2, "shard": 2}, {"replicate": 2}])
@on_ranks("mesh", returns={})
def test_other_meshes(mesh: dict[str, int]) -> dict[str, list[str]]:
    found, on_mesh = {}, device_mesh(**{"replicate": 1, "shard": 1, **mesh})
    for name in ("tensorwise", "delayed", "rowwise_folded", "mxfp8", "mxfp8 mxfp4"):
        nets = {}
        for keep in (True, False):
            net = nets[keep] = Tied()
            convert_to_float8_training(net, config=config_of(name, keep))
            for module in (*net.layers, net):
                fully_shard(module, mesh=on_mesh if "replicate" in mesh else on_mesh["shard"])
        found[name] = compared(nets, lambda x: x + dist.get_rank())
    return {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize(
    "name", ["tensorwise", "delayed", "rowwise_folded", "mxfp8", "mxfp8 mxfp4"]
)
@on_ranks(2, returns=[0, 0, 0, 0, 2])
def test_a_weight_is_cast_once_per_step(name: str) -> list[int]:
    """Casts of single weights: in two micro-batches, an update (which casts all weights together),
    an evaluation, a micro-batch, and another one after a write to a weight.
    """
    world = Distributed(2, 1, config=config_of(name, True), net_arguments={"hidden": 256})
    x, found = world.mine(torch.ones(2, 4, 64)), []
    optimizer = torch.optim.SGD(world.net.parameters(), lr=0.1)

    def run() -> None:
        world.net(x).square().mean().backward()

    run()
    run()
    optimizer.step()
    update_float8_scales(world.net)
    with counted() as counts:

        def note() -> None:
            found.append(counts[0])
            counts[0] = 0

        run()
        run()
        note()
        optimizer.step()
        update_float8_scales(world.net)
        note()
        with torch.no_grad():
            world.net(x)
        note()
        run()
        note()
        with torch.no_grad():
            world.net.layers[0].w1.weight.mul_(2.0)
        run()
        note()
    return found
