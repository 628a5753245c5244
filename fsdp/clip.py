"""Gradient clipping for models whose parameters live on several meshes."""

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import chain

import torch
from torch.distributed.device_mesh import DeviceMesh
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

    torch's function refuses gradients on different meshes, such as FSDP2 x TP and FSDP2 alone. Over
    several axes it also makes an all-reduce for each, and warns of that on every rank.

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

    Collectives: for each set of axes on which gradients are sharded, an all-reduce of one number.
    With ``exact``, an all-reduce (MAX) of 4 bytes and one (SUM) of 8 bytes per fold (2 up to
    2 ** 25 elements, 3 up to 2 ** 31) instead. Where no process group has all ranks of a set of
    axes, each of these is one all-reduce per axis. Before that, Partial gradients are all-reduced.

    Raises:
        ValueError: a ``norm_type`` that is not positive; ``exact`` with one other than 2, or with
            gradients in fp64.
        RuntimeError: see ``error_if_nonfinite``.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            by_mesh.setdefault(getattr(grad, "device_mesh", None), []).append(parameter)
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type must be positive, got {norm_type}")
    if exact and norm_type != 2.0:
        raise ValueError(f"clip_grad_norm_: exact=True is for norm_type=2, not {norm_type}")
    gradients = [[p.grad for p in members if p.grad is not None] for members in by_mesh.values()]
    if exact and gradients:
        # The inf-norm of a single norm is that norm. Its 2-norm could be rounded.
        norms, norm_type = [exact_norm([*chain(*gradients)]).float()], torch.inf
    else:
        shards = _shards_by_groups(chain(*gradients)).items()
        norms = [_norm_over(groups, some, norm_type, foreach) for groups, some in shards]
    total = get_total_norm(norms, norm_type, error_if_nonfinite, foreach)
    for members in by_mesh.values():
        clip_grads_with_norm_(members, max_norm, total, foreach)
    return total


def _shards_by_groups(
    gradients: Iterable[torch.Tensor],
) -> dict[mesh.GroupNames, list[torch.Tensor]]:
    """This rank's shards of gradients, by the groups over which their squares are summed."""
    shards: dict[mesh.GroupNames, list[torch.Tensor]] = {}
    for gradient in gradients:
        gradient = mesh.reduced(gradient)
        layout = mesh.Layout.of(gradient)
        # Gradients are summed over the axes that shard them, so that replicas count once.
        groups = () if layout is None else mesh.groups_over(layout.mesh, layout.sharded_axes())
        shards.setdefault(groups, []).append(mesh.local_tensor(gradient).flatten())
    return shards


def _norm_over(
    groups: mesh.GroupNames, shards: Sequence[torch.Tensor], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    """The p-norm of gradients of which each rank of the groups has a shard."""
    if not groups:
        return get_total_norm(shards, norm_type, False, foreach)
    # A shard without elements has no largest one, and a rank may have no other shards.
    norm = get_total_norm([*filter(torch.numel, shards)], norm_type, False, foreach)
    # The same dtype on all ranks, also without shards.
    dtype = torch.promote_types(shards[0].dtype, torch.float32)
    norm = norm.to(shards[0].device, dtype)
    if math.isinf(norm_type):
        return mesh.all_reduce_max(norm, groups)
    power = norm**norm_type
    for name in groups:
        power = funcol.wait_tensor(funcol.all_reduce(power, "sum", name))
    return power ** (1 / norm_type)


def exact_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of gradients, in fp64: the sum of squares is exact in each of several folds.

    The square of an fp32 number is exact in fp64. A fold takes from each of the N squares its bits
    above a unit, which is so large that fp64 holds any sum of N such numbers without rounding. The
    next fold, with a smaller unit, takes bits of the rest. The final rest is too small to matter in
    fp32. So the order and the grouping of the sums do not matter. (Demmel and Nguyen, "Parallel
    Reproducible Summation", 2015.)
    """
    if any(gradient.dtype is torch.float64 for gradient in gradients):
        raise ValueError("clip_grad_norm_: exact=True is for gradients in fp32, bf16 or fp16")
    shards = _shards_by_groups(gradients)
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
