"""Update of delayed scales after a step, with one all-reduce of all amaxes."""

import torch
import torch.nn as nn

from fp8_dist.fsdp.groups import common_groups
from fp8_dist.fsdp.precompute import check_agreement, reshard
from fp8_dist.fsdp.streams import note_made
from fp8_dist.linear.amax_history import advance
from fp8_dist.linear.module import float8_layers
from fp8_dist.linear.saved_histories import warn_if_not_restored
from fp8_dist.mesh import all_reduce_max


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="sync_float8_amax_and_scale_history updates what graphs ask for when they run; call it "
    "outside of code that is compiled with fullgraph=True"
)
@torch.no_grad()
def sync_float8_amax_and_scale_history(module: nn.Module) -> None:
    """Add the amaxes of this step to the histories of all DELAYED operands, and update the scales.

    Call it once per optimizer step, on all ranks, outside of forward and backward (after the last
    micro-batch; before or after ``optimizer.step()``). Scales become the same on all ranks that
    share the model. These are the ranks of the meshes of its weights and of inputs prepared in
    float8. Data-parallel ranks of plain weights, as in DDP, keep histories of their own. A call
    without a forward since the last call changes nothing.

    Args:
        module: the model, or a part of it.

    Collectives: exactly one all-reduce (MAX) of 4 bytes per operand, over all axes of these
    meshes; none if there are no meshes. As in precompute, the first call may make the groups of a
    pipeline's stages, and may compare the layers of the module.

    Raises:
        ValueError: ranks differ in the layers of ``module``, or no operand in it is DELAYED.
        NotImplementedError: weights on several meshes that are not slices of one root mesh.
    """
    check_agreement(module, "sync_float8_amax_and_scale_history")
    layers = [layer for layer in float8_layers(module).values() if layer.histories]
    if not layers:
        raise ValueError(
            "sync_float8_amax_and_scale_history: the module has no Float8Linear with a DELAYED "
            "operand; convert it with the recipe 'delayed', or drop the call"
        )
    reshard(module, "sync_float8_amax_and_scale_history")
    histories = [history for layer in layers for history in layer.histories.values()]
    meshes = {mesh for layer in layers for mesh in layer.meshes()}
    # The device of the mesh, because offloaded weights are on another one.
    device = next((mesh.device_type for mesh in meshes), layers[0].float8_weight.shard().device)
    zero = torch.zeros((), device=device)
    values = torch.stack([zero if h.current is None else h.current.to(device) for h in histories])
    groups, _ = common_groups({mesh: range(mesh.ndim) for mesh in meshes})
    values = all_reduce_max(values, groups)
    for layer in layers:
        warn_if_not_restored(layer.histories, layer.fqn)
    advance(histories, values)
    note_made(layers)
    for layer in layers:
        if "weight" in layer.histories:
            layer.float8_weight.cache.drop()
        layer.float8_weight.cache.synced()
