"""Exponents of blocks that shards cut.

Each rank computes the exponent of its part of a block. Exponents grow with the amax, so the largest
over the ranks is the exponent of the whole block.
"""

from collections.abc import Sequence

import torch

from fp8_dist.granularity import Blocks, Granularity
from fp8_dist.mesh import (
    GroupNames,
    Layout,
    all_reduce_max,
    global_offset,
    is_packed,
    local_sizes,
    narrowed,
    shard_starts,
    sharded_dim,
)
from fp8_dist.torch_internals import cached_but_in_graphs


def granularity_at(granularity: Granularity, layout: Layout | None) -> Granularity:
    """Granularity of this rank's part of a tensor, which may begin inside of blocks.

    Raises:
        NotImplementedError: a part has several pieces, which cut blocks; on all ranks.
    """
    if not isinstance(granularity, Blocks) or layout is None:
        return granularity
    if not granularity.amax_axes(layout.placements, len(layout.shape)):
        return granularity
    _check_pieces(layout, granularity)
    return granularity.at(global_offset(layout), _are_unequal(layout, granularity))


@cached_but_in_graphs
def _check_pieces(layout: Layout, granularity: Blocks) -> None:
    if are_cut(layout, granularity) and any(is_packed(layout, dim) for dim in _dims(granularity)):
        raise NotImplementedError(
            f"a tensor of shape {tuple(layout.shape)} placed as {list(layout.placements)} can't be "
            f"cast with one scale per {granularity.name}: ranks have several pieces of it "
            "(_StridedShard), and some begin inside of a block; redistribute it to Shard or "
            "Replicate first, or choose sizes of which all pieces have whole blocks"
        )


@cached_but_in_graphs
def _are_unequal(layout: Layout, granularity: Blocks) -> bool:
    """Whether ranks' parts can't be joined as float8; the same result on all ranks."""
    return are_cut(layout, granularity) or any(
        is_packed(layout, dim) or len(local_sizes(layout, dim)) > 1 for dim in _dims(granularity)
    )


def _dims(granularity: Blocks) -> tuple[int, ...]:
    """The dims along which shards may cut blocks."""
    return (-1, -2) if granularity.rows > 1 else (-1,)


@cached_but_in_graphs
def cut_blocks(layout: Layout, granularity: Granularity, dim: int) -> tuple[int, ...]:
    """Indices of the blocks along a dim (-1 or -2) that shards cut; the same on all ranks."""
    assert isinstance(granularity, Blocks)
    size = granularity.columns if dim == -1 else granularity.rows
    starts = shard_starts(layout, dim)
    return tuple(sorted({start // size for start in starts if start % size}))


def are_cut(layout: Layout, granularity: Granularity) -> bool:
    """Whether shards cut blocks of a tensor; the same result on all ranks."""
    return bool(cut_blocks(layout, granularity, -1) or cut_blocks(layout, granularity, -2))


def scales_fit_into_gather(layout: Layout, granularity: Granularity) -> bool:
    """Whether FSDP2's gather of a weight can carry block scales; the same result on all ranks.

    The gather moves rows of the matrix of scales, as many from each rank.
    """
    # The axes of FSDP2 come before that of tensor parallelism.
    dims = [sharded_dim(p, 2) for p in layout.placements]
    by_columns = next((dim for dim in dims if dim is not None), 0) == 1
    uneven = len(local_sizes(layout, 0)) > 1
    return not (by_columns or uneven or are_cut(layout, granularity))


def whole_exponents(
    exponents: torch.Tensor, layout: Layout, granularity: Granularity, groups: GroupNames
) -> torch.Tensor:
    """Combine the exponents of all ranks' parts of a matrix to those of the matrix.

    Args:
        exponents: the exponents of this rank's part, uint8, ``[r, c]``.
        layout: the layout of the matrix.
        granularity: the granularity of the whole matrix.
        groups: the groups of the axes along which it is sharded.

    Returns:
        The exponents of the matrix, uint8, ``[R, C]``.

    Collectives: for each of ``groups`` one all-reduce (MAX) of 1 byte per block.
    """
    every = exponents.new_zeros(granularity.scale_shape(layout.shape))
    narrowed(every, granularity.offset(global_offset(layout)), exponents.shape).copy_(exponents)
    return all_reduce_max(every, groups)


def part_of_exponents(
    every: torch.Tensor, part: Sequence[int], layout: Layout, granularity: Granularity
) -> torch.Tensor:
    """Slice this rank's exponents from those of a matrix; ``part`` is the shape of its shard."""
    local = granularity_at(granularity, layout)
    offset = granularity.offset(global_offset(layout))
    return narrowed(every, offset, local.scale_shape(part)).contiguous()


def reduced_exponents(
    exponents: torch.Tensor, layout: Layout, granularity: Granularity, groups: GroupNames
) -> torch.Tensor:
    """Reduce the exponents of this rank's one-row blocks to those of the whole blocks.

    Args:
        exponents: the exponents of this rank's part, uint8, ``[..., C]``.
        layout: the layout of the tensor.
        granularity: the granularity of the whole tensor.
        groups: the groups of the axes along which its rows are sharded.

    Collectives: none if no block is cut. Otherwise one all-reduce (MAX) for each of ``groups``, of
    1 byte per row and cut block.
    """
    cut = cut_blocks(layout, granularity, -1)
    if not (groups and cut):
        return exponents
    first = granularity.offset(global_offset(layout))[-1]
    # For each cut block of the part: its index among all cut blocks, and in the part. Indexing by
    # a list would copy the list to the device.
    ends = [(i, n - first) for i, n in enumerate(cut) if first <= n < first + exponents.shape[-1]]
    parts = exponents.new_zeros((*exponents.shape[:-1], len(cut)))
    for slot, column in ends:
        parts[..., slot] = exponents[..., column]
    found, whole = all_reduce_max(parts, groups), exponents.clone()
    for slot, column in ends:
        whole[..., column] = found[..., slot]
    return whole
