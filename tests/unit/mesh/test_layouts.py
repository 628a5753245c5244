"""Placements of a linear layer's operands, and the mesh axes of an amax, without a process group."""

import pytest
from torch.distributed.tensor import (
    Partial,
    Replicate,
    Shard,
)

from fp8_dist.mesh import (
    linear_layouts,
    sharded_axes,
)


def test_placements_that_no_linear_layer_has() -> None:
    with pytest.raises(ValueError, match=r"Partial\(sum\)|P\(sum\)|Partial"):
        linear_layouts([Replicate()], [Partial()], 2)
    # One table row per mesh axis.
    at = linear_layouts([Shard(1), Partial()], [Shard(0), Shard(1)], 3)
    assert at.input == (Replicate(), Shard(2))
    assert at.output == (Shard(2), Partial())


def test_the_axes_of_an_amax() -> None:
    placements = [Replicate(), Shard(0), Partial(), Shard(1)]
    assert sharded_axes(placements, 2) == (1, 3)
    # One scale per row: the axes that cut rows; one per column: those that cut columns.
    assert sharded_axes(placements, 2, [1]) == (3,)
    assert sharded_axes(placements, 2, [0]) == (1,)
    assert sharded_axes([Shard(-1)], 3, [2]) == (0,)
