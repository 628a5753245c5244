"""Placements of a linear layer's operands, without a process group."""

from torch.distributed.tensor import Partial, Replicate, Shard

from fp8_dist.mesh import linear_layouts


def test_a_partial_input_is_reduced_as_the_weight_needs_it() -> None:
    # One table row per mesh axis.
    at = linear_layouts([Shard(1), Partial()], [Shard(0), Shard(1)], 3)
    assert at.input == (Replicate(), Shard(2))
    assert at.output == (Shard(2), Partial())
