"""Errors that only ranks can provoke, alike on all of them."""

import torch
from nets import Distributed
from ranks import RankPools, device_mesh
from reference import raised
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from fp8_dist import Float8Linear, precompute_float8_dynamic_scale
from fp8_dist.tensor_parallel import declare_placements


def precomputed_while_gathered() -> str:
    world = Distributed(2, 1, fsdp_arguments={"reshard_after_forward": False})
    world.net(world.mine(torch.randn(4, 8, 64)))
    return raised(ValueError, lambda: precompute_float8_dynamic_scale(world.net.layers[0].w1))


def test_precompute_of_a_layer_whose_weight_is_gathered(ranks: RankPools) -> None:
    text = ranks(2).run_same(precomputed_while_gathered)
    assert "these weights are unsharded float8 copies: layers.0.w1. Call it on the root" in text


def flattened() -> str:
    layer = Float8Linear(16, 16)
    layer.weight = nn.Parameter(layer.weight.detach().flatten())
    mesh = device_mesh(tp=2)
    return raised(
        ValueError,
        lambda: declare_placements(
            layer, mesh, weight=Shard(0), input=Replicate(), output=Shard(-1)
        ),
    )


def test_declared_placements_of_a_flattened_weight(ranks: RankPools) -> None:
    text = ranks(2).run_same(flattened)
    assert "has shape (256,), not [out_features, in_features] (flattened by FSDP1?)" in text
