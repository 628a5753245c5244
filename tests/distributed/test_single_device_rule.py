"""The single-device rule: what a rank multiplies is, bit for bit, its part of one device's cast."""

import copy
import math
from itertools import pairwise

import pytest
import torch
import torch.nn as nn
from nets import Distributed, full, full_state, wrong_casts
from ranks import RankPools, device_mesh
from reference import same_bits, sqnr, weights_used
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)
from fp8_dist.linear import float8_layers

MESHES = [(2, 1), (1, 2), (2, 2), (1, 4), (4, 1)]


def weights_of_a_step(dp: int, tp: int, precompute: bool, power_of_2: bool) -> list[str]:
    """Names of layers whose float8 weight differs from the single-process cast, in two steps."""
    config = Float8LinearConfig(round_scales_to_power_of_2=power_of_2)
    world = Distributed(dp, tp, config=config)
    optimizer = torch.optim.SGD(world.net.parameters(), lr=0.5)
    wrong = []
    for step in range(2):
        if precompute:
            precompute_float8_dynamic_scale(world.net)
        masters = full_state(world.net)
        with weights_used(world.net) as used:
            world.net(world.mine(torch.randn(4, 8, 64))).sum().backward()
        assert len(used) == 6
        found = wrong_casts(used, masters, world.mesh["tp"], power_of_2)
        wrong += [f"step {step}: {text}" for text in found]
        optimizer.step()
        optimizer.zero_grad()
    return wrong


@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_weights(ranks: RankPools, dp: int, tp: int, precompute: bool) -> None:
    for power_of_2 in (False, True):
        for wrong in ranks(dp * tp).run(weights_of_a_step, dp, tp, precompute, power_of_2):
            assert wrong == []


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
    for layer in net:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    if precompute:
        precompute_float8_dynamic_scale(net)
    x = torch.randn(5, sizes[0])
    with weights_used(net) as used:
        output = net(x)
    output.sum().backward()
    wrong = wrong_casts(used, masters)
    expected = reference(x)
    expected.sum().backward()
    if not bf16:
        if not same_bits(output, expected):
            wrong.append("output")
        for (name, actual), parameter in zip(
            net.named_parameters(), reference.parameters(), strict=True
        ):
            if sqnr(parameter.grad, full(actual.grad)) < 120:
                wrong.append(f"gradient of {name}")
    return wrong


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_uneven_and_empty_shards(
    ranks: RankPools, world_size: int, precompute: bool, bf16: bool
) -> None:
    for wrong in ranks(world_size).run(uneven_weights, (16, 33, 1, 5, 3), precompute, bf16):
        assert wrong == []


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


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_column_parallel_outputs(
    ranks: RankPools, tp: int, sequence_parallel: bool, bf16: bool
) -> None:
    for wrong in ranks(tp).run(column_parallel_outputs, tp, sequence_parallel, bf16):
        assert wrong == []


def non_finite_everywhere(where: str, bad: float) -> bool:
    """One bad value on one rank: does every value of the model's output turn into NaN here?"""
    world = Distributed(2, 2)
    x = world.mine(torch.randn(2, 8, 64))
    if torch.distributed.get_rank() == 1:
        target = {"input": x, "weight": world.net.layers[0].w1.weight._local_tensor._tensor}[where]
        target.detach().view(-1)[3] = bad
    if where == "weight":
        precompute_float8_dynamic_scale(world.net)
    output = world.net(x)
    return bool(output.isnan().all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_weight_on_one_rank_is_visible_on_all(ranks: RankPools, bad: float) -> None:
    assert ranks(4).run(non_finite_everywhere, "weight", bad) == [True] * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_input_is_visible_on_its_tp_ranks(ranks: RankPools, bad: float) -> None:
    # Ranks 0 and 1 share the activations; 2 and 3 have others.
    assert ranks(4).run(non_finite_everywhere, "input", bad) == [True, True, False, False]
