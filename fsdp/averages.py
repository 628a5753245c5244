"""Means of gradients over more ranks, or over fewer, than FSDP2 reduces them over."""

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fp8_dist import fsdp_internals as internals
from fp8_dist.text import kind_of
from fp8_dist.weight.weights import checked_module, weights_of

_CALLER = "average_gradients_over"


def average_gradients_over(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the gradients of a module means over the ranks of a mesh.

    FSDP2 sums gradients over the ranks that it shards a module over, and divides by their number.
    With expert parallelism, a rank's gradient is already a sum over the tokens of other ranks, so
    the number is too small. If each rank has a part of a sequence, it is too large. The loss is a
    mean over the ranks of ``mesh``; so are the gradients then, on any mesh, including axes of one
    rank::

        for experts in float8_experts(model).values():
            parallelize_module(experts, mesh["ep"], Float8ExpertParallel())
            fully_shard(experts, mesh=mesh["dp"])
            average_gradients_over(experts, mesh)  # of dp and ep

    The sum is divided after its reduction, which any backend supports. As FSDP2's setters that it
    calls, it is for the parameters that ``fully_shard`` of this module manages, not for those of
    other FSDP modules in it, and a later call replaces it.

    Args:
        module: a module that ``fully_shard`` was called on.
        mesh: all ranks that have batches of their own, with any number of axes.

    Collectives: none.

    Raises:
        ValueError: ``fully_shard`` was not called on ``module``, or manages no parameter there;
            or ``mesh`` neither contains the ranks that FSDP2 reduces over, nor is a part of them.
        TypeError: ``module`` is not an nn.Module, or ``mesh`` not a DeviceMesh.
    """
    name = _name_of(checked_module(module))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{_CALLER}: {name} was given {mesh!r} instead of a DeviceMesh; pass the mesh of all "
            'ranks that have batches of their own, such as mesh["dp", "ep"]'
        )
    if not isinstance(module, FSDPModule):
        raise ValueError(
            f"{_CALLER}: fully_shard was not called on {name}, so FSDP2 does not reduce its "
            "gradients; call fully_shard on that module before"
        )
    groups = internals.fsdp_groups_of_module(module)
    if not groups:
        raise ValueError(
            f"{_CALLER}: {name} has no parameters outside of other FSDP modules in it; pass those"
        )
    over = set(mesh.mesh.flatten().tolist())
    for group in groups:
        reduced = set(group.mesh_info.mesh.mesh.flatten().tolist())
        if not (reduced <= over or over <= reduced):
            raise ValueError(
                f"{_CALLER}: FSDP2 reduces the gradients of {name} over ranks {sorted(reduced)}, "
                f"and the mesh has ranks {sorted(over)}; pass the mesh of all ranks that have "
                'batches of their own, such as mesh["dp", "ep"]'
            )
    module.set_gradient_divide_factor(float(mesh.size()))
    module.set_force_sum_reduction_for_comms(True)


def _name_of(module: nn.Module) -> str:
    """The name of a module in messages: its FQN, if it was converted."""
    names = [weight.fqn for weight in weights_of(module).values()]
    return next(filter(None, names), kind_of(module))
