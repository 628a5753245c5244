"""Global tensors from the local parts of DTensors, for parts of any sizes."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from fp8_dist.mesh import local_tensor
from fp8_dist.torch_internals import funcol


def whole_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor or DTensor ``[..., K]`` as a plain fp32 matrix, on all ranks of its mesh.

    The ranks exchange the sizes of their shards. The shape of a DTensor that was made of local
    tensors, as by tensor-parallel styles, is torch's guess. It is wrong where the ranks don't
    divide a dim.

    Collectives: for each mesh axis on which a DTensor is sharded, an all-gather of its sizes,
    8 bytes, and one of its parts; an all-reduce for each axis on which it is Partial.
    """
    whole = _whole(tensor) if isinstance(tensor, DTensor) else tensor
    return whole.reshape(-1, whole.shape[-1]).to(torch.float32)


def _whole(tensor: DTensor) -> torch.Tensor:
    mesh, whole = tensor.device_mesh, local_tensor(tensor)
    plain = all(p.is_replicate() or p.is_partial() or type(p) is Shard for p in tensor.placements)
    if not plain:  # a parameter that FSDP2 shards over tensor parallelism: its shape is known
        return tensor.full_tensor()
    # In reverse order: the last axis divides the parts of the axes before it.
    for axis in reversed(range(mesh.ndim)):
        placement, group = tensor.placements[axis], str(mesh.get_group(axis).group_name)
        if placement.is_partial():
            reduced = funcol.all_reduce(whole, placement.reduce_op, group)  # type: ignore[attr-defined]
            whole = funcol.wait_tensor(reduced)
        elif isinstance(placement, Shard):
            whole = _gathered(whole, placement.dim, mesh.size(axis), group)
    return whole


def _gathered(part: torch.Tensor, dim: int, ranks: int, group: str) -> torch.Tensor:
    """Concatenate the parts of all ranks of a group along ``dim``."""
    rows = part.movedim(dim, 0)
    sizes = _all_gather(torch.tensor([len(rows)], device=part.device), ranks, group).tolist()
    padding = [0, 0] * (rows.ndim - 1) + [0, max(sizes) - len(rows)]
    padded = F.pad(rows, padding).contiguous()
    parts = _all_gather(padded, ranks, group).view(ranks, *padded.shape)
    filled = [each[:size] for each, size in zip(parts, sizes, strict=True)]
    return torch.cat(filled).movedim(0, dim)


def _all_gather(part: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return funcol.wait_tensor(funcol.all_gather_into_tensor(part, ranks, group))
