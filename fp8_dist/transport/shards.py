"""Reduce-scatter of DTensors, from Partial to Shard, with encoded summands."""

from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.nn.functional import pad

from fp8_dist.mesh import Layout, Placements, has_pieces, local_tensor, sharded_dim
from fp8_dist.torch_internals import funcol
from fp8_dist.transport.encoding import Encoding, Part, Run, encode, runs_of, sum_of
from fp8_dist.transport.exchange import start_all_to_all


class Scattering(NamedTuple):
    """A reduce-scatter in flight, which :func:`finish_reduction` completes."""

    received: torch.Tensor  # [W, ..., bytes], in flight: the pieces of all ranks for this one
    own: torch.Tensor  # this rank's own summand, padded to the size of the first shard
    runs: tuple[Run, ...]
    rank: int
    layout: Layout  # of the result


def start_reduction(
    tensor: DTensor, placements: Placements, transport: Encoding
) -> DTensor | Scattering:
    """Start to redistribute a DTensor to other placements.

    A reduce-scatter, from Partial to Shard, becomes an all-to-all of encoded pieces, one for each
    rank, with blocks along the last dim. The rank that owns a shard sums in fp32, in the order of
    ranks, and rounds once to the dtype of the tensor. Its own piece is not encoded. All other
    redistributions are left to torch.

    Args:
        tensor: a DTensor, on a 1-D mesh if ``transport`` is not None.
        transport: the encoding of the pieces; None for torch's reduce-scatter.

    Collectives: an all-to-all of W pieces of the size of the first shard (smaller shards are
    padded, as in torch's reduce-scatter), or those of ``DTensor.redistribute``.
    """
    dim = _scattered_dim(tensor, placements, transport)
    if dim is None:
        if tuple(tensor.placements) == placements:
            return tensor
        return tensor.redistribute(placements=placements, async_op=True)
    mesh, local = tensor.device_mesh, local_tensor(tensor)
    ranks, coordinate = mesh.size(), mesh.get_coordinate()
    assert coordinate is not None
    size = local.shape[dim]
    chunk = -(-size // ranks)
    if chunk * ranks != size:
        local = pad(local, (0, 0) * (local.ndim - 1 - dim) + (0, chunk * ranks - size))
    pieces = local.unflatten(dim, (ranks, chunk)).movedim(dim, 0).contiguous()
    runs = runs_of([Part(0, pieces.shape[-1], transport)])
    received = start_all_to_all(encode(pieces, runs, pieces.dtype), mesh.get_group())
    layout = Layout(mesh, placements, tensor.shape)
    return Scattering(received, pieces[coordinate[0]], runs, coordinate[0], layout)


def finish_reduction(started: DTensor | Scattering) -> DTensor:
    """Return the result of :func:`start_reduction`, in flight if torch redistributes it."""
    if isinstance(started, DTensor):
        return started
    received, own, runs, rank, layout = started
    total = sum_of(funcol.wait_tensor(received), runs, own.dtype, own, rank)
    dim = sharded_dim(layout.placements[0], len(layout.shape))
    assert dim is not None
    chunk = total.shape[dim]
    kept = max(0, min(chunk, layout.shape[dim] - rank * chunk))
    return layout.wrap(total.narrow(dim, 0, kept).to(own.dtype).contiguous())


def reduced_to(tensor: DTensor, placements: Placements, transport: Encoding) -> DTensor:
    """Run :func:`start_reduction`, then :func:`finish_reduction`."""
    return finish_reduction(start_reduction(tensor, placements, transport))


def _scattered_dim(tensor: DTensor, placements: Placements, transport: Encoding) -> int | None:
    """The dim of a reduce-scatter with encoded pieces; None if torch redistributes."""
    if transport is None or tensor.device_mesh.size() == 1 or tensor.numel() == 0:
        return None
    assert tensor.device_mesh.ndim == 1, tensor.device_mesh
    is_sum = tensor.placements[0] == Partial() and not has_pieces(placements)
    return sharded_dim(placements[0], tensor.ndim) if is_sum else None
