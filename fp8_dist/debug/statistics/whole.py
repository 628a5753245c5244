"""Global tensors from the local parts of DTensors, whatever sizes these have."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from fp8_dist.mesh import local_tensor
from fp8_dist.torch_internals import funcol


def whole_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor or DTensor ``[..., K]`` as a plain fp32 matrix, on all ranks of its mesh.

    The sizes of shards are asked for: the shape of a DTensor that was made of local tensors, as
    tensor-parallel styles do, is torch's guess, and wrong where the ranks don't divide a dim.

    Collectives: for each mesh axis on which a DTensor is sharded an all-gather of its sizes,
    8 bytes, and one of its parts; an all-reduce for each one on which it is Partial.
    """
    whole = _whole(tensor) if isinstance(tensor, DTensor) else tensor
    return whole.reshape(-1, whole.shape[-1]).to(torch.float32)


def _whole(tensor: DTensor) -> torch.Tensor:
    mesh, whole = tensor.device_mesh, local_tensor(tensor)
    plain = all(p.is_replicate() or p.is_partial() or type(p) is Shard for p in tensor.placements)
    if not plain:  # a parameter that FSDP2 shards over tensor parallelism: its shape is known
        return tensor.full_tensor()
    # (The last axis splits what the axes before it have split.)
    for axis in reversed(range(mesh.ndim)):
        placement, group = tensor.placements[axis], str(mesh.get_group(axis).group_name)
        if placement.is_partial():
            reduced = funcol.all_reduce(whole, placement.reduce_op, group)  # type: ignore[attr-defined]
            whole = funcol.wait_tensor(reduced)
        elif isinstance(placement, Shard):
            whole = _gathered(whole, placement.dim, mesh.size(axis), group)
    return whole


def _gathered(part: torch.Tensor, dim: int, ranks: int, group: str) -> torch.Tensor:
    """The parts of all ranks of a group, one behind the other along ``dim``."""
    rows = part.movedim(dim, 0)
    sizes = _all_gather(torch.tensor([len(rows)], device=part.device), ranks, group).tolist()
    padding = [0, 0] * (rows.ndim - 1) + [0, max(sizes) - len(rows)]
    padded = F.pad(rows, padding).contiguous()
    parts = _all_gather(padded, ranks, group).view(ranks, *padded.shape)
    filled = [each[:size] for each, size in zip(parts, sizes, strict=True)]
    return torch.cat(filled).movedim(0, dim)


def _all_gather(part: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return funcol.wait_tensor(funcol.all_gather_into_tensor(part, ranks, group))
