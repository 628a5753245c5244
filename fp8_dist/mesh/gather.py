"""All-gathers of many sharded tensors, in one message."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, product

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fp8_dist.mesh.amax import GroupNames, groups_over
from fp8_dist.mesh.layout import Layout, Pieces, local_tensor, narrowed, reduced, regions
from fp8_dist.torch_internals import cached_but_in_graphs, funcol, resolve_process_group

# In a message, tensors begin at multiples of this, where a view of any dtype may begin.
_ALIGNMENT = 16


def full_tensors(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Gather the full tensors of DTensors, on the mesh's device. Plain tensors pass as they are.

    Shards may be uneven, empty, or of several pieces. This call exchanges the messages. A full
    tensor is made when the iterator reaches it.

    Args:
        tensors: the list is emptied, so that shards are not kept beside the messages.

    Collectives: for all tensors that are sharded over the same groups, one all-gather of bytes over
    each of these groups (:func:`fp8_dist.mesh.groups_over`). All ranks send as many bytes as the
    rank with the most. Each tensor is padded to 16 bytes. Partial tensors are all-reduced first.
    """
    alike: dict[GroupNames, list[int]] = {}
    for i, tensor in enumerate(tensors):
        tensors[i] = tensor = reduced(tensor)
        layout = Layout.of(tensor)
        groups = () if layout is None else groups_over(layout.mesh, layout.sharded_axes())
        alike.setdefault(groups, []).append(i)
    full: dict[int, Callable[[], torch.Tensor]] = {}
    for groups, indices in alike.items():
        shards = [tensors[i] for i in indices]
        makers = _gathered(shards, groups) if groups else [partial(_on_mesh, t) for t in shards]
        full |= zip(indices, makers, strict=True)
    tensors.clear()
    return (full.pop(i)() for i in range(len(full)))


def _on_mesh(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor on its mesh's device. FSDP2 may have offloaded it to the CPU."""
    local = local_tensor(tensor).detach()
    return local.to(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else local


def _gathered(
    tensors: Sequence[torch.Tensor], groups: GroupNames
) -> list[Callable[[], torch.Tensor]]:
    """Gather the shards of tensors, and return functions that make the full tensors."""
    layouts = [layout for tensor in tensors if (layout := Layout.of(tensor)) is not None]
    members = tuple(
        [tuple(dist.get_process_group_ranks(resolve_process_group(name))) for name in groups]
    )
    parts = [
        _parts(layout, tuple(layout.mesh.get_coordinate() or ()), members) for layout in layouts
    ]
    by_rank = [
        [_padded(_sizes(pieces), t.dtype) for pieces, t in zip(shards, tensors, strict=True)]
        for shards in zip(*parts, strict=True)
    ]
    begins = [list(accumulate(sizes, initial=0)) for sizes in by_rank]
    length = max(_ALIGNMENT, *[ends[-1] for ends in begins])
    device = layouts[0].mesh.device_type
    message, at = torch.empty(length, dtype=torch.uint8, device=device), 0
    for tensor in tensors:
        local = _on_mesh(tensor).contiguous()
        sent = local.view(-1).view(torch.uint8)
        message[at : at + sent.numel()].copy_(sent)
        at += _padded(local.shape, local.dtype)
    for name, ranks in zip(groups, members, strict=True):
        message = funcol.wait_tensor(funcol.all_gather_into_tensor(message, len(ranks), name))
    messages = message.view(-1, length)
    dtypes = [tensor.dtype for tensor in tensors]

    def full(i: int) -> torch.Tensor:
        whole = messages.new_empty(layouts[i].shape, dtype=dtypes[i])
        for message, ends, pieces in zip(messages, begins, parts[i], strict=True):
            sizes = _sizes(pieces)
            end = ends[i] + math.prod(sizes) * dtypes[i].itemsize
            shard = message[ends[i] : end].view(dtypes[i]).view(sizes)
            for offset, local, size in regions(pieces):
                narrowed(whole, offset, size).copy_(narrowed(shard, local, size))
        return whole

    return [partial(full, i) for i in range(len(layouts))]


def _sizes(pieces: Sequence[Pieces]) -> list[int]:
    return [sum(end - begin for begin, end in dim_pieces) for dim_pieces in pieces]


def _padded(sizes: Sequence[int], dtype: torch.dtype) -> int:
    return -(-math.prod(sizes) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


@cached_but_in_graphs
def _parts(
    layout: Layout, coordinate: tuple[int, ...], members: tuple[tuple[int, ...], ...]
) -> tuple[tuple[Pieces, ...], ...]:
    """The parts of each dim that ranks have, in the order of their messages.

    Args:
        coordinate: the coordinate of this rank.
        members: the ranks of each group that messages are gathered over, one after the other.
    """
    mesh, senders = layout.mesh.mesh, [coordinate]
    coordinates = dict(zip(mesh.flatten().tolist(), product(*map(range, mesh.shape)), strict=True))
    for ranks in members:
        group_coordinates = [coordinates[rank] for rank in ranks]
        moves = [len({*along}) > 1 for along in zip(*group_coordinates, strict=True)]
        senders = [
            tuple([new if m else old for new, old, m in zip(member, sender, moves, strict=True)])
            for member in group_coordinates
            for sender in senders
        ]
    return tuple([layout.pieces_at(sender) for sender in senders])
