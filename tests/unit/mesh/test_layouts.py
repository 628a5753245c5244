"""Placements of a linear layer's operands, and layouts on meshes that are equal."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from fp8_dist.mesh import Layout, linear_layouts
from scripts.plan.world import fake_world


def test_layouts_of_equal_meshes_keep_their_groups() -> None:
    """Ranks may guess uneven shapes: a cache of meshes had mixed groups, so that ranks hung."""
    with fake_world(4):
        meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) for _ in range(2)]
        assert meshes[0] == meshes[1]
        for mesh in meshes:
            layout = Layout(mesh, (Shard(0), Replicate()), torch.Size([4, 2]))
            assert layout.wrap(torch.ones(2, 2)).device_mesh is mesh
            assert layout.replicated_over(mesh["dp"]).mesh is mesh


def test_a_partial_input_is_reduced_as_the_weight_needs_it() -> None:
    # One table row per mesh axis.
    at = linear_layouts([Shard(1), Partial()], [Shard(0), Shard(1)], 3)
    assert at.input == (Replicate(), Shard(2))
    assert at.output == (Shard(2), Partial())
