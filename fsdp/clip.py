"""Gradient clipping for models whose parameters live on several meshes."""

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import chain

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fp8_dist import mesh
from fp8_dist.torch_internals import funcol

_SIGNIFICAND = 52  # bits of an fp64 number, without the leading one
_AT_ONCE = 1 << 24  # elements that are squared in fp64


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    exact: bool = False,
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
        exact: compute a 2-norm whose bits do not depend on how gradients are divided among ranks.
            This takes a pass over the gradients in fp64.

    Returns:
        The norm of all gradients before clipping, a plain 0-dim tensor, the same on all ranks of
        the meshes.

    Collectives: those of torch's norm for each mesh: an all-reduce of one number per axis on
    which a gradient is sharded. With ``exact``, an all-reduce (MAX) of 4 bytes and one (SUM) of 8
    bytes per fold (2 up to 2 ** 25 elements, 3 up to 2 ** 31) for each set of axes on which
    gradients are sharded. Before that, Partial gradients are all-reduced.

    Raises:
        ValueError: ``exact`` with a ``norm_type`` other than 2, or with gradients in fp64.
        RuntimeError: see ``error_if_nonfinite``.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            by_mesh.setdefault(getattr(grad, "device_mesh", None), []).append(parameter)
    if exact and norm_type != 2.0:
        raise ValueError(f"clip_grad_norm_: exact=True is for norm_type=2, not {norm_type}")
    gradients = [[p.grad for p in members if p.grad is not None] for members in by_mesh.values()]
    if exact and gradients:
        # The inf-norm of a single norm is that norm. Its 2-norm could be rounded.
        norms, norm_type = [exact_norm([*chain(*gradients)]).float()], torch.inf
    else:
        norms = [get_total_norm(some, norm_type, False, foreach) for some in gradients]
        norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = get_total_norm(norms, norm_type, error_if_nonfinite, foreach)
    for members in by_mesh.values():
        clip_grads_with_norm_(members, max_norm, total, foreach)
    return total


def exact_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of gradients, in fp64: the sum of squares is exact in each of several folds.

    The square of an fp32 number is exact in fp64. A fold takes from each of the N squares its bits
    above a unit, which is so large that fp64 holds any sum of N such numbers without rounding. The
    next fold, with a smaller unit, takes bits of the rest. The final rest is too small to matter in
    fp32. So the order and the grouping of the sums do not matter. (Demmel and Nguyen, "Parallel
    Reproducible Summation", 2015.)
    """
    # Gradients are summed over the axes that shard them, so that replicas count once.
    shards: dict[mesh.GroupNames, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.dtype is torch.float64:
            raise ValueError("clip_grad_norm_: exact=True is for gradients in fp32, bf16 or fp16")
        gradient = mesh.reduced(gradient)
        layout = mesh.Layout.of(gradient)
        groups = () if layout is None else mesh.groups_over(layout.mesh, layout.sharded_axes())
        shards.setdefault(groups, []).append(mesh.local_tensor(gradient).flatten())
    device = next(iter(shards.values()))[0].device
    amaxes = []
    for groups, pieces in shards.items():
        amax = get_total_norm(filter(torch.numel, pieces), torch.inf).to(pieces[0].device).float()
        amaxes.append(mesh.all_reduce_max(amax, groups).to(device))
    amax = torch.stack(amaxes).amax()
    room = sum(gradient.numel() for gradient in gradients).bit_length() + 1
    # All squares are less than 2 ** top.
    top = 2 * torch.frexp(amax.double()).exponent.long()
    # Enough folds for the rest of all squares to be at most 2 ** -26 of their sum.
    folds = 1 + max(1, -(-(2 * room - 26) // (_SIGNIFICAND - room)))
    units = [top + room - fold * (_SIGNIFICAND - room) for fold in range(folds)]
    # 1.5 * 2 ** unit. Adding and subtracting it rounds a number to a multiple of its last bit.
    anchors = [((unit + 1023) << 52 | 1 << 51).view(torch.float64) for unit in units]
    total = amax.new_zeros(folds, dtype=torch.float64)
    for groups, pieces in shards.items():
        sums = torch.zeros(folds, dtype=torch.float64, device=pieces[0].device)
        for part in (part for piece in pieces for part in piece.split(_AT_ONCE)):
            rest = part.double().square_()
            for fold, anchor in enumerate(anchors):
                high = rest.add(anchor.to(rest.device)).sub_(anchor.to(rest.device))
                sums[fold] += high.sum().to(sums.device)
                rest.sub_(high)
        for name in groups:
            sums = funcol.wait_tensor(funcol.all_reduce(sums, "sum", name))
        total += sums.to(device)
    norm = reduce(torch.add, reversed(total.unbind())).sqrt()
    return torch.where(amax.isfinite(), norm, amax)
