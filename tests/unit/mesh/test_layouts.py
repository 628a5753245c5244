"""Placements of a linear layer's operands, without a process group."""

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from fp8_dist.mesh import linear_layouts


def test_placements_that_no_linear_layer_has() -> None:
    with pytest.raises(ValueError, match=r"Partial\(sum\)|P\(sum\)|Partial"):
        linear_layouts([Replicate()], [Partial()], 2)
    # One table row per mesh axis.
    at = linear_layouts([Shard(1), Partial()], [Shard(0), Shard(1)], 3)
    assert at.input == (Replicate(), Shard(2))
    assert at.output == (Shard(2), Partial())
