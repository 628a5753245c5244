"""Gradient clipping for models whose parameters live on several meshes."""

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip gradients like ``torch.nn.utils.clip_grad_norm_``, for parameters on several meshes.

    torch's function refuses gradients on different meshes, such as FSDP2 x TP and FSDP2 alone. This
    one computes torch's norm for each mesh, and then the norm of these norms.

    Args:
        parameters: the parameters whose ``grad`` is scaled in place. A ``grad`` is a plain tensor
            or a DTensor on any mesh.
        max_norm: the maximum norm of the gradients.
        norm_type: the type of the p-norm, which may be ``inf``.
        error_if_nonfinite: raise RuntimeError for a norm that is NaN or infinite.
        foreach: as in torch.

    Returns:
        The norm of all gradients before clipping, a plain 0-dim tensor, the same on all ranks of
        the meshes.

    Collectives: those of torch's norm for each mesh: an all-reduce of one number per axis on
    which a gradient is sharded.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = []
    for members in by_mesh.values():
        gradients = [p.grad for p in members if p.grad is not None]
        norm = get_total_norm(gradients, norm_type, False, foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = get_total_norm(norms, norm_type, error_if_nonfinite, foreach)
    for members in by_mesh.values():
        clip_grads_with_norm_(members, max_norm, total, foreach)
    return total
