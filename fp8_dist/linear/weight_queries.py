"""Operators by which compiled graphs and selective checkpointing query a ``Float8Weight``."""

import torch

from fp8_dist.kernels import empty_copies
from fp8_dist.linear.scale_query import copied, owner_of, query
from fp8_dist.linear.weight_cache import ScaleState
from fp8_dist.scaling import empty_scales, empty_statistics, scheme_named


@query(
    "weight_statistics(Tensor x, Tensor handle, str[] schemes, int[] start, bool keep) -> Tensor[]"
)
def weight_statistics(
    x: torch.Tensor, handle: torch.Tensor, schemes: list[str], start: list[int], keep: bool
) -> list[torch.Tensor]:
    """The statistics of a weight for each scheme, in a flat list, for a forward."""
    source = ScaleState.FROM_FORWARD if keep else None
    known = owner_of(handle).known_for_graph(x, source)
    return copied([each for key in schemes for each in known[scheme_named(key)]], x.device)


@query(
    "weight_copies(Tensor x, Tensor handle, str[] schemes, int[] start, int[] of, "
    "bool[] transposed, bool keep) -> Tensor[]"
)
def weight_copies(
    x: torch.Tensor,
    handle: torch.Tensor,
    schemes: list[str],
    start: list[int],
    of: list[int],
    transposed: list[bool],
    keep: bool,
) -> list[torch.Tensor]:
    """The scales of a weight for each scheme, then its copies, in a flat list, for a forward.

    Args:
        start: the :func:`common_start` of the schemes.
        of: the index of each copy's scheme.
        transposed: whether each copy is ``[K, N]`` in memory.
        keep: whether new statistics serve later forwards and an amax is recorded.
    """
    return owner_of(handle).copies_for_graph(x, schemes, of, transposed, keep)


# An operator of its own, because selective checkpointing must not save its results: FSDP2 may
# gather in a checkpointed forward and not in its recomputation.
@query("shard_statistics(Tensor x, Tensor handle, str[] schemes, int[] start) -> Tensor[]")
def shard_statistics(
    x: torch.Tensor, handle: torch.Tensor, schemes: list[str], start: list[int]
) -> list[torch.Tensor]:
    """The statistics of a weight for each scheme, in a flat list, for FSDP2's gather."""
    known = owner_of(handle).known_for(x, ScaleState.FROM_GATHER)
    return copied([each for key in schemes for each in known[scheme_named(key)]], x.device)


def _fake_statistics(
    x: torch.Tensor, handle: torch.Tensor, schemes: list[str], start: list[int], keep: bool = False
) -> list[torch.Tensor]:
    at = (start[0], start[1])
    return [s for key in schemes for s in empty_statistics(scheme_named(key), x, at)]


@weight_copies.register_fake
def _fake_copies(
    x: torch.Tensor,
    handle: torch.Tensor,
    schemes: list[str],
    start: list[int],
    of: list[int],
    transposed: list[bool],
    keep: bool,
) -> list[torch.Tensor]:
    each, at = [scheme_named(key) for key in schemes], (start[0], start[1])
    scales = [scale for scheme in each for scale in empty_scales(scheme, x, at)]
    return [*scales, *empty_copies(x, each[0].dtype, transposed)]


weight_statistics.register_fake(_fake_statistics)
shard_statistics.register_fake(_fake_statistics)
