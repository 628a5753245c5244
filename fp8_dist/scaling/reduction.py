"""Reduction of the statistics of ranks' parts of a tensor to those of the global tensor."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8_dist import mesh
from fp8_dist.mesh import GroupNames, Layout, Pieces
from fp8_dist.scaling.level import Level, Start
from fp8_dist.scaling.scheme import Scheme, Statistics
from fp8_dist.torch_internals import cached_but_in_graphs


class Placed(NamedTuple):
    """Statistics of one level for a rank's part of a tensor, and their place in a reduction.

    Attributes:
        local: the statistics of the part.
        shape: the shape of the statistics that ranks reduce.
        pieces: for each dim of ``shape``, the indices that ``local`` has; empty if it has all.
    """

    local: Tensor
    shape: list[int]
    pieces: list[Pieces]

    @staticmethod
    def of(local: Tensor, level: Level, layout: Layout, axes: Sequence[int]) -> "Placed":
        """Place local statistics for a reduction over some mesh axes."""
        if not (axes and local.ndim):
            return Placed(local, list(local.shape), [])  # all of them
        ndim, shape = len(layout.shape), list(local.shape)
        pieces: list[Pieces] = [((0, size),) for size in shape]
        dims = {mesh.sharded_dim(layout.placements[axis], ndim) for axis in axes}
        in_parts = [d for d in range(local.ndim) if d in dims and level.block(d, ndim) is not None]
        if in_parts:  # only then: the mesh's ranks have no values under FakeTensorMode
            global_shape, level_pieces = level.shape(layout.shape), level.pieces(layout)
            for dim in in_parts:
                shape[dim], pieces[dim] = global_shape[dim], level_pieces[dim]
        return Placed(local, shape, pieces)

    @property
    def size(self) -> int:
        """The number of statistics that ranks reduce."""
        return math.prod(self.shape)

    def flat(self, dtype: torch.dtype) -> Tensor:
        """The statistics to reduce, as 1-D integers, with zeros in the places of other ranks."""
        integers = as_integers(self.local, dtype)
        if list(integers.shape) == self.shape:
            return integers.reshape(-1)
        whole = integers.new_zeros(self.shape)
        for offset, local, sizes in mesh.regions(self.pieces):
            mesh.narrowed(whole, offset, sizes).copy_(mesh.narrowed(integers, local, sizes))
        return whole.reshape(-1)

    def whole(self, reduced: Tensor) -> Tensor:
        """The global statistics, from the reduced message."""
        return from_integers(reduced, self.local.dtype).view(self.shape)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of the global statistics, in the shape of the local ones."""
        return mesh.taken(whole, self.pieces)


def message_dtype(statistics: Sequence[Tensor]) -> torch.dtype:
    """The dtype in which statistics are reduced together: uint8 if all of them are, else int32."""
    for statistic in statistics:
        if statistic.dtype is not torch.uint8:
            return torch.int32
    return torch.uint8


def as_integers(statistics: Tensor, dtype: torch.dtype) -> Tensor:
    """View fp32 statistics as integers of the same order, or convert uint8 ones to ``dtype``.

    Do so before padding or copying: inductor (2.13) can't view the results of these as integers.
    """
    if statistics.dtype is torch.uint8:
        return statistics.to(dtype)
    return statistics.contiguous().view(torch.int32)


def from_integers(integers: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`as_integers`."""
    return integers.to(torch.uint8) if dtype is torch.uint8 else integers.view(torch.float32)


def reduced_statistics(scheme: Scheme, local: Statistics, layout: Layout | None) -> Statistics:
    """Reduce the statistics of a rank's part of a tensor to the statistics of the global tensor.

    Args:
        scheme: the scheme that measured the statistics.
        local: the statistics of this rank's part.
        layout: the layout of the tensor.

    Returns:
        This rank's part of the global statistics.

    Collectives: none if ranks share no block. Otherwise an all-reduce (MAX) over each of
    :func:`reduction_groups`, of the statistics of all levels whose blocks ranks share. A statistic
    has 4 bytes, or 1 byte if all of them are uint8.
    """
    if layout is None or not (groups := reduction_groups(scheme, layout)):
        return local
    if scheme.is_scalar and len(local) == 1:
        return (mesh.all_reduce_max(local[0], groups),)
    axes = scheme.axes(layout)
    union = sorted({axis for over in axes for axis in over})
    sent = [i for i, over in enumerate(axes) if over]
    places = [Placed.of(local[i], scheme.levels[i], layout, union) for i in sent]
    if len(local) == 1 and places[0].shape == list(local[0].shape):
        # Every rank has a part of each block.
        return (mesh.all_reduce_max(local[0], groups),)
    result = list(local)
    for i, place, whole in zip(sent, places, all_reduced(places, groups), strict=True):
        result[i] = place.part(whole).contiguous()
    return tuple(result)


def all_reduced(places: Sequence[Placed], groups: GroupNames) -> list[Tensor]:
    """Reduce local statistics to global ones, in one message."""
    dtype = message_dtype([place.local for place in places])
    message = torch.cat([place.flat(dtype) for place in places])
    parts = mesh.all_reduce_max(message, groups).view(dtype).split([place.size for place in places])
    return [place.whole(part) for place, part in zip(places, parts, strict=True)]


def global_statistics(
    parts: Sequence[tuple[Scheme, Statistics, Layout | None]],
) -> list[Statistics]:
    """Combine the statistics of all ranks' parts of tensors into those of the whole tensors.

    Collectives: an all-reduce (MAX) over each group of the axes that shard the tensors, in one
    message for all tensors with the same groups. It has 4 bytes per statistic of a whole tensor, or
    1 byte if all statistics are uint8.
    """
    results = [local for _, local, _ in parts]
    alike: dict[GroupNames, list[tuple[int, list[Placed]]]] = {}
    for i, (scheme, local, layout) in enumerate(parts):
        if layout is not None:
            axes = layout.sharded_axes()
            levels = zip(local, scheme.levels, strict=True)
            places = [Placed.of(part, level, layout, axes) for part, level in levels]
            alike.setdefault(mesh.groups_over(layout.mesh, axes), []).append((i, places))
    for groups, members in alike.items():
        reduced = iter(all_reduced([place for _, places in members for place in places], groups))
        for i, places in members:
            results[i] = tuple([next(reduced) for _ in places])
    return results


def reduction_groups(scheme: Scheme, layout: Layout | None) -> GroupNames:
    """The groups over which the statistics of a tensor are reduced."""
    if layout is None:
        return ()
    over, replicated = _reduced_axes(scheme, layout)
    return mesh.groups_over(layout.mesh, over, replicated) if over else ()


@cached_but_in_graphs
def _reduced_axes(scheme: Scheme, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes over which statistics are reduced, and those along which they are the same."""
    over = {axis for axes in scheme.axes(layout) for axis in axes}
    replicated = [i for i, p in enumerate(layout.placements) if p.is_replicate()]
    return tuple(sorted(over)), tuple(replicated)


def packed(by_scheme: Sequence[Statistics]) -> Tensor:
    """The statistics of several schemes as integers of one dtype, 1-D; see :func:`unpacked`."""
    flat = [statistic for statistics in by_scheme for statistic in statistics]
    dtype = message_dtype(flat)
    parts = [as_integers(statistic, dtype).reshape(-1) for statistic in flat]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpacked(
    integers: Tensor, schemes: Sequence[Scheme], shape: Sequence[int], start: Start
) -> list[Statistics]:
    """The inverse of :func:`packed`, for the statistics of a tensor.

    Args:
        integers: the packed statistics, concatenated.
        shape, start: the shape of the tensor, and the :func:`common_start` of the schemes.
    """
    by_scheme, end = [], 0
    for scheme in schemes:
        statistics = []
        for level, size in zip(scheme.levels, scheme.scale_shapes(shape, start), strict=True):
            begin, end = end, end + math.prod(size)
            statistics.append(from_integers(integers[begin:end], level.statistic).view(size))
        by_scheme.append(tuple(statistics))
    return by_scheme
