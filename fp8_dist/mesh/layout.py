"""Layout of a tensor on a mesh, its local part, and the sizes of all ranks' parts."""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fp8_dist import torch_internals
from fp8_dist.text import kind_of
from fp8_dist.torch_internals import AsyncCollectiveTensor, StridedShard, cached_but_in_graphs

Placements = tuple[Placement, ...]


class Layout(NamedTuple):
    """Mesh, placements and global shape of a DTensor."""

    mesh: DeviceMesh
    placements: Placements
    shape: torch.Size

    @staticmethod
    def of(tensor: torch.Tensor | None) -> "Layout | None":
        """The layout of a DTensor; ``None`` for anything else."""
        if not isinstance(tensor, DTensor):
            return None
        return Layout(tensor.device_mesh, tuple(tensor.placements), tensor.shape)

    def wrap(self, local: torch.Tensor) -> DTensor:
        """Make the DTensor of this layout with the given local tensor, without collectives."""
        return torch_internals.make_dtensor(local, self.mesh, self.placements, self.shape)

    def sharded_axes(self) -> tuple[int, ...]:
        """The mesh axes that shard the tensor."""
        dims = [sharded_dim(placement, len(self.shape)) for placement in self.placements]
        return tuple(i for i, d in enumerate(dims) if d is not None and self.mesh.size(i) > 1)

    def replicated_over(self, mesh: DeviceMesh) -> "Layout":
        """The layout of the tensor after it was gathered over a 1-D mesh, an axis of its own."""
        return Layout(self.mesh, _replicated_over(self, mesh), self.shape)

    def pieces_at(self, coordinate: Sequence[int]) -> "tuple[Pieces, ...]":
        """The part of each dim that the rank at a coordinate has."""
        # torch's compute_local_shape_and_global_offset computes with tensors. That is slow on many
        # ranks, and tensors have no values in a graph.
        pieces: list[Pieces] = [((0, size),) for size in self.shape]
        for axis, dim, parts in _cuts(self):
            pieces[dim] = _shard(pieces[dim], self.mesh.size(axis), coordinate[axis], parts)
        return tuple(pieces)

    def offset(self) -> list[int]:
        """Offset of this rank's shard in the global tensor, per dim; 0 where it is empty."""
        return [pieces[0][0] if pieces else 0 for pieces in local_pieces(self)]

    def local_sizes(self, dim: int) -> set[int]:
        """The sizes of a dim on the ranks of the mesh; the same result on all ranks."""
        return {sum(end - begin for begin, end in shard) for shard in _shards(self, dim)}

    def cuts_blocks(self, dim: int, block: int) -> bool:
        """Whether any rank's piece along a dim begins inside a block; the same on all ranks."""
        return any(begin % block for shard in _shards(self, dim) for begin, _ in shard)

    def has_strided_shards(self, dim: int) -> bool:
        """Return whether any rank's shard has several pieces along a dim; the same on all ranks."""
        return any(len(shard) > 1 for shard in _shards(self, dim))


def check_axis(mesh: object, caller: str) -> None:
    """Raise TypeError for anything but a mesh, and ValueError for a mesh of several axes."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{caller} needs a DeviceMesh, got {kind_of(mesh)}; init_device_mesh makes "
            "one, and DeviceMesh.from_group(group, device_type) makes one of a process group"
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        raise ValueError(
            f"{caller} needs a 1-D mesh, got one with shape {tuple(mesh.shape)} and axes {names}: "
            f"pass the axis that it divides over, such as mesh[{names[-1] if names else 'tp'!r}]"
        )


def layout_over(tensor: torch.Tensor, mesh: DeviceMesh, placement: Placement, fqn: str) -> Layout:
    """Layout of the global tensor whose local part on a 1-D mesh is ``tensor``.

    All local parts must have the same size. If ``tensor`` is a DTensor, either FSDP2 shards each
    part over other axes of the same root mesh, or the DTensor's mesh includes the axis
    (``dp_mesh_dims``). ``fqn`` is the layer's name, for messages.

    Raises:
        ValueError: the other axes overlap with ``mesh``, or come from another root mesh.
    """
    dim, parts = sharded_dim(placement, tensor.ndim), mesh.size()
    shape = torch.Size(n * parts if d == dim else n for d, n in enumerate(tensor.shape))
    layout = Layout.of(tensor)
    if layout is None:
        return Layout(mesh, (placement,), shape)
    if layout.mesh.ndim > 1 and any(_is_axis(layout.mesh, mesh)):
        return layout
    # FSDP2 uses the same placements when it shards a DTensor.
    outer = tuple(
        StridedShard(dim, split_factor=parts)
        if dim is not None and parts > 1 and sharded_dim(p, tensor.ndim) == dim
        else p
        for p in layout.placements
    )
    try:
        joined = _joined(layout.mesh, mesh)
    except RuntimeError as error:
        raise ValueError(
            f"{fqn}: the weight is a DTensor on {layout.mesh}, so it can't be a local part on "
            f"{mesh}. Declare another axis of the same init_device_mesh than FSDP2 shards over; "
            "leave a layer that a parallel style was applied to as it is"
        ) from error
    return Layout(joined, (*outer, placement), shape)


@lru_cache(maxsize=1024)
def _is_axis(mesh: DeviceMesh, other: DeviceMesh) -> tuple[bool, ...]:
    """For each axis of a mesh, whether its ranks are those of another mesh, which is 1-D."""
    ranks = dist.get_process_group_ranks
    return tuple([ranks(group) == ranks(other.get_group()) for group in mesh.get_all_groups()])


@lru_cache(maxsize=1024)  # because each forward asks for it
def _replicated_over(layout: Layout, mesh: DeviceMesh) -> Placements:
    axes = zip(_is_axis(layout.mesh, mesh), layout.placements, strict=True)
    return tuple([Replicate() if same else p for same, p in axes])


@lru_cache(maxsize=1024)
def _joined(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    return torch_internals.concatenated_mesh([outer, inner])


def sharded_dim(placement: Placement, ndim: int) -> int | None:
    """The dim that a placement shards, as ``Shard`` or as FSDP2's ``_StridedShard``; else None."""
    return placement.dim % ndim if isinstance(placement, (Shard, StridedShard)) else None


def has_strided_placements(placements: Placements | None) -> bool:
    """Return whether placements give a rank several pieces of an activation (``_StridedShard``)."""
    return any(isinstance(placement, StridedShard) for placement in placements or ())


def normalized(placements: Placements, ndim: int) -> Placements:
    """Make the dims of ``Shard`` placements non-negative."""
    return tuple(Shard(p.dim % ndim) if type(p) is Shard else p for p in placements)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, or ``tensor`` itself. Waits for a collective in flight."""
    local = torch_internals.dtensor_local(tensor) if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def as_dtensor(x: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """Make a DTensor from equal local parts, differentiably; return a DTensor as it is."""
    if isinstance(x, DTensor):
        return x
    return DTensor.from_local(x, mesh, placements, run_check=False)


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Wrap ``local`` as a DTensor of ``tensor``'s layout; return it as it is if there is none."""
    layout = Layout.of(tensor)
    return local if layout is None else layout.wrap(local)


# A rank's part of a dim: (begin, end) of each piece, ascending.
Pieces = tuple[tuple[int, int], ...]


def this_rank() -> int:
    """The rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def local_pieces(tensor: torch.Tensor | Layout) -> tuple[Pieces, ...]:
    """This rank's part of each dim of a tensor, given the tensor or its layout."""
    layout = tensor if isinstance(tensor, Layout) else Layout.of(tensor)
    if layout is None:
        return tuple([((0, n),) for n in tensor.shape])
    coordinate = layout.mesh.get_coordinate()
    assert coordinate is not None
    return layout.pieces_at(coordinate)


def regions(pieces: Sequence[Pieces]) -> list[tuple[tuple[int, ...], ...]]:
    """The boxes that make up a rank's part, if any, as (offset, offset in the part, size)."""
    boxes = itertools.product(*[_with_local_begin(dim_pieces) for dim_pieces in pieces])
    return [tuple(zip(*box, strict=True)) if box else ((), (), ()) for box in boxes]


def _with_local_begin(pieces: Pieces) -> list[tuple[int, int, int]]:
    sizes = [end - begin for begin, end in pieces]
    firsts = itertools.accumulate(sizes, initial=0)
    return [(begin, first, n) for (begin, _), n, first in zip(pieces, sizes, firsts, strict=False)]


@cached_but_in_graphs
def _shards(layout: Layout, dim: int) -> tuple[Pieces, ...]:
    """Each rank's part of a dim, in the order in which the axes cut it."""
    dim %= len(layout.shape)
    shards: tuple[Pieces, ...] = (((0, layout.shape[dim]),),)
    for axis, cut_dim, parts in _cuts(layout):
        if cut_dim == dim:
            n = layout.mesh.size(axis)
            shards = tuple(_shard(shard, n, rank, parts) for shard in shards for rank in range(n))
    return shards


def _cuts(layout: Layout) -> list[tuple[int, int, int]]:
    """The cuts that make a rank's shard, in order: (axis, dim, number of strided parts or 1)."""
    ndim, inner = len(layout.shape), [1] * len(layout.shape)
    cuts: list[tuple[int, int, int]] = []
    last: list[tuple[int, int, int]] = []
    for axis in reversed(range(len(layout.placements))):
        placement = layout.placements[axis]
        dim = sharded_dim(placement, ndim)
        if dim is None:
            continue
        parts = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
        # FSDP2 shards the part that tensor parallelism leaves, although its axis comes first.
        is_fsdp = 1 < parts == inner[dim]
        if is_fsdp:
            last.append((axis, dim, 1))
        else:
            cuts.append((axis, dim, parts))
        inner[dim] *= layout.mesh.size(axis) if is_fsdp or parts == 1 else 0
    return [*reversed(cuts), *last]


def _shard(pieces: Pieces, n: int, rank: int, parts: int) -> Pieces:
    """A rank's chunk of pieces divided by ``n`` ranks, or its chunk of each strided part."""
    if parts == 1:
        return _chunk(pieces, n, rank)
    shard: list[tuple[int, int]] = []
    for part in range(parts):
        for begin, end in _chunk(_chunk(pieces, parts, part), n, rank):
            if shard and shard[-1][1] == begin:
                begin = shard.pop()[0]
            shard.append((begin, end))
    return tuple(shard)


def _chunk(pieces: Pieces, n: int, index: int) -> Pieces:
    """A chunk as made by torch.chunk: sizes are rounded up, so the last chunks may be smaller."""
    size = -(-sum(end - begin for begin, end in pieces) // n)
    taken, first = [], index * size
    for begin, end in pieces:
        start, stop = max(begin, begin + first), min(end, begin + first + size)
        if start < stop:
            taken.append((start, stop))
        first -= end - begin
    return tuple(taken)


def narrowed(whole: torch.Tensor, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """A view of the part of a tensor that begins at ``offset`` and has the given sizes."""
    for dim, (start, n) in enumerate(zip(offset, size, strict=True)):
        whole = whole.narrow(dim, start, n)
    return whole


def taken(whole: torch.Tensor, pieces: Sequence[Pieces]) -> torch.Tensor:
    """A rank's part of a tensor, given its pieces of each dim; a view if each dim has one piece."""
    for dim, dim_pieces in enumerate(pieces):
        parts = [whole.narrow(dim, begin, end - begin) for begin, end in dim_pieces or ((0, 0),)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def reduced(tensor: torch.Tensor) -> torch.Tensor:
    """All-reduce a tensor in high precision over each axis on which it is Partial."""
    if not isinstance(tensor, DTensor):
        return tensor
    if True not in [p.is_partial() for p in tensor.placements]:
        return tensor
    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.redistribute(placements=placements)


def redistributed(tensor: DTensor, placements: Placements) -> DTensor:
    """Redistribute a DTensor. The local tensor of the result may be in flight."""
    if tuple(tensor.placements) == placements:
        return tensor
    return tensor.redistribute(placements=placements, async_op=True)
