"""The single-device rule beyond operands: results of layers, and values that are not finite."""

import copy
import math
from itertools import pairwise

import pytest
import torch
import torch.nn as nn
from nets import Distributed, full, wrong_casts
from ranks import RankPools, device_mesh
from reference import same_bits, sqnr, weights_used
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)
from fp8_dist.linear import float8_layers


def uneven_weights(sizes: tuple[int, ...], precompute: bool, bf16: bool) -> list[str]:
    """FSDP2 alone, layers whose out_features the ranks can't share evenly."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
    masters = {name: p.detach().clone() for name, p in net.named_parameters()}
    reference = copy.deepcopy(net)
    convert_to_float8_training(reference)
    convert_to_float8_training(net, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    mesh = device_mesh(dp=torch.distributed.get_world_size())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else MixedPrecisionPolicy()
    for layer in (*net, net):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    if precompute:
        precompute_float8_dynamic_scale(net)
    x = torch.randn(5, sizes[0])
    with weights_used(net) as used:
        output = net(x)
    output.sum().backward()
    wrong = wrong_casts(used, masters)
    expected = reference(x)
    expected.sum().backward()
    if bf16:
        return wrong
    if not same_bits(output, expected):
        wrong.append("output")
    for (name, actual), other in zip(net.named_parameters(), reference.parameters(), strict=True):
        if sqnr(other.grad, full(actual.grad)) < 120:
            wrong.append(f"gradient of {name}")
    return wrong


@pytest.mark.parametrize(
    ("world_size", "precompute", "bf16"), [(2, False, False), (4, True, False), (4, False, True)]
)
def test_uneven_and_empty_shards(
    ranks: RankPools, world_size: int, precompute: bool, bf16: bool
) -> None:
    found = ranks(world_size).run(uneven_weights, (16, 33, 1, 5, 3), precompute, bf16)
    assert found == [[]] * world_size


def column_parallel_outputs(tp: int, sequence_parallel: bool, bf16: bool) -> list[str]:
    world = Distributed(1, tp, sequence_parallel)
    dtype = torch.bfloat16 if bf16 else torch.float32
    for model in (world.net, world.twin):
        model.to(dtype)
    outputs: dict[str, dict[str, torch.Tensor]] = {"net": {}, "twin": {}}
    for kind, model in (("net", world.net), ("twin", world.twin)):
        for name, layer in float8_layers(model).items():
            layer.register_forward_hook(
                lambda m, i, o, kind=kind, name=name: outputs[kind].setdefault(name, o)
            )
    x = torch.randn(2, 8, 64, dtype=dtype)
    world.net.layers[0](world.mine(x))
    world.twin.layers[0](x)
    rank = world.mesh.get_local_rank("tp")
    return [
        name
        for name in ("layers.0.w1", "layers.0.w3")
        if not same_bits(
            outputs["net"][name], outputs["twin"][name].chunk(tp, dim=-1)[rank].contiguous()
        )
    ]


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "bf16"), [(2, True, False), (2, False, True), (4, True, True)]
)
def test_column_parallel_outputs(
    ranks: RankPools, tp: int, sequence_parallel: bool, bf16: bool
) -> None:
    assert ranks(tp).run(column_parallel_outputs, tp, sequence_parallel, bf16) == [[]] * tp


BAD = {"input": (math.nan, math.inf), "weight": (math.nan, math.inf, -math.inf)}


def non_finite_everywhere() -> dict[str, list[bool]]:
    """One bad value on one rank: does every value of the model's output turn into NaN here?"""
    found: dict[str, list[bool]] = {where: [] for where in BAD}
    for where, bad in ((where, bad) for where, values in BAD.items() for bad in values):
        world = Distributed(2, 2)
        x, weight = world.mine(torch.randn(2, 8, 64)), world.net.layers[0].w1.weight
        if torch.distributed.get_rank() == 1:
            target = x if where == "input" else weight._local_tensor._tensor
            target.detach().view(-1)[3] = bad
        if where == "weight":
            precompute_float8_dynamic_scale(world.net)
        found[where].append(bool(world.net(x).isnan().all()))
    return found


def test_a_non_finite_value_on_one_rank_is_visible_on_all_that_share_it(ranks: RankPools) -> None:
    results = ranks(4).run(non_finite_everywhere)
    assert [found["weight"] for found in results] == [[True] * 3] * 4
    # Ranks 0 and 1 share the activations; 2 and 3 have others.
    assert [found["input"] for found in results] == [[True] * 2] * 2 + [[False] * 2] * 2
