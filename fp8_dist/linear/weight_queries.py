"""Operators by which compiled graphs and selective checkpointing query a ``Float8Weight``."""

import torch

from fp8_dist.granularity import granularity_named
from fp8_dist.kernels import empty_copies
from fp8_dist.linear.scale_query import copies, owner_of, query
from fp8_dist.linear.weight_cache import ScaleState


@query("weight_scalings(Tensor x, Tensor handle, str[] granularities, bool keep) -> Tensor[]")
def weight_scalings(
    x: torch.Tensor, handle: torch.Tensor, granularities: list[str], keep: bool
) -> list[torch.Tensor]:
    """The (multiplier, scale) of each cast of a weight, flat, for a forward."""
    source = ScaleState.FROM_FORWARD if keep else None
    return copies(owner_of(handle).answer_for_graph(x, source).values(), x.device)


@query(
    "weight_copies(Tensor x, Tensor handle, ScalarType dtype, str[] granularities, int[] of, "
    "bool[] transposed, bool keep) -> Tensor[]"
)
def weight_copies(
    x: torch.Tensor,
    handle: torch.Tensor,
    dtype: torch.dtype,
    granularities: list[str],
    of: list[int],
    transposed: list[bool],
    keep: bool,
) -> list[torch.Tensor]:
    """The scale of each cast of a weight, and then its copies, for a forward.

    Args:
        of: the index of each copy's cast.
        transposed: whether each copy is ``[K, N]`` in memory.
        keep: whether new scalings serve later forwards and an amax is recorded.
    """
    return owner_of(handle).copies_for_graph(x, of, transposed, keep)


# An operator of its own, because selective checkpointing must not save its results: FSDP2 may
# gather in a checkpointed forward and not in its recomputation.
@query("shard_scalings(Tensor x, Tensor handle, str[] granularities) -> Tensor[]")
def shard_scalings(
    x: torch.Tensor, handle: torch.Tensor, granularities: list[str]
) -> list[torch.Tensor]:
    """The (multiplier, scale) of each cast of a weight, flat, for FSDP2's gather."""
    return copies(owner_of(handle).answer(x, ScaleState.FROM_GATHER).values(), x.device)


def _fake_scalings(
    x: torch.Tensor, handle: torch.Tensor, granularities: list[str], keep: bool = False
) -> list[torch.Tensor]:
    return [scale for name in granularities for scale in (_scale(x, name), _scale(x, name))]


def _scale(x: torch.Tensor, granularity: str) -> torch.Tensor:
    known = granularity_named(granularity)
    return x.new_empty(known.scale_shape(x.shape), dtype=known.scale_dtype)


@weight_copies.register_fake
def _fake_copies(
    x: torch.Tensor,
    handle: torch.Tensor,
    dtype: torch.dtype,
    granularities: list[str],
    of: list[int],
    transposed: list[bool],
    keep: bool,
) -> list[torch.Tensor]:
    return [*(_scale(x, name) for name in granularities), *empty_copies(x, dtype, transposed)]


weight_scalings.register_fake(_fake_scalings)
shard_scalings.register_fake(_fake_scalings)
