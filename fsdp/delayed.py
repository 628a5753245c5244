"""The end of a step for delayed scales: all amaxes in one all-reduce, then the next scales."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from fp8_dist.delayed import advance
from fp8_dist.fsdp.mesh_axes import group_along, union_of
from fp8_dist.fsdp.precompute import reshard
from fp8_dist.linear import float8_layers
from fp8_dist.sharding import all_reduce_max


@torch.no_grad()
def sync_float8_amax_and_scale_history(module: nn.Module) -> None:
    """Take what this step saw of all DELAYED operands into their histories, and scale by these.

    Call it once per optimizer step, on all ranks, outside of forward and backward (after the last
    micro-batch; before or after ``optimizer.step()``). Scales become the same on all ranks that
    share the model: those of the meshes that its weights live on. (Data-parallel ranks of plain
    weights, as in DDP, keep histories of their own.)

    Args:
        module: the model, or a part of it.

    Collectives: exactly one all-reduce (MAX) of 4 bytes per operand, over all axes of these
    meshes; none if no weight is a DTensor.

    Raises:
        ValueError: no operand in ``module`` is DELAYED.
        NotImplementedError: weights on several meshes that are not slices of one root mesh.
    """
    layers = [layer for layer in float8_layers(module).values() if layer.histories]
    if not layers:
        raise ValueError(
            "sync_float8_amax_and_scale_history: the module has no Float8Linear with a DELAYED "
            "operand; convert it with the recipe 'delayed', or drop the call"
        )
    reshard(module)
    histories = [history for layer in layers for history in layer.histories.values()]
    device = layers[0].local_shard().device
    zero = torch.zeros((), device=device)
    values = torch.stack([zero if h.current is None else h.current.to(device) for h in histories])
    union = union_of({w.device_mesh for w in (m.weight for m in layers) if isinstance(w, DTensor)})
    if union:
        values = all_reduce_max(values, group_along(union, dist.get_rank()))
    advance(histories, values)
    for layer in layers:
        layer.weight_cache.synced()
