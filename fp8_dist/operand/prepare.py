"""Preparation of operands: plan the move, look statistics up or measure them, cast, and move.

:func:`cast_local` is the only caller of a scheme's cast. If one float8 copy serves all GEMMs of an
operand, the operand is cast first and moved as float8. Otherwise it is moved in high precision and
cast where it arrives.
"""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from fp8_dist import mesh
from fp8_dist import torch_internals as internals
from fp8_dist.kernels.quantization import as_matrix
from fp8_dist.mesh import Layout, Placements
from fp8_dist.operand import observers
from fp8_dist.operand.history import AmaxHistory
from fp8_dist.operand.moves import scheme_of_move
from fp8_dist.operand.observers import Original, Owner, Use
from fp8_dist.operand.sources import FRESH, Source, look_up_in_op
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import CastPlan, Quantized, Scales, Scheme, Start, common_start, reduction
from fp8_dist.scaling.operators import cast
from fp8_dist.tensor import Float8Tensor, quantized_as

# The float8 copies of a local tensor, in the order of their plan.
Copies = Sequence[Quantized]
# An operand on this rank, [..., K] or [M, K]: in float8, or a plain tensor in high precision.
Local = Quantized | torch.Tensor
# The operand that each GEMM takes. A tensor may be in flight: see wait_local().
Operands = dict[Gemm, Local]


def cast_local(
    x: torch.Tensor,
    plan: CastPlan,
    layout: Layout | None = None,
    source: Source = FRESH,
    use: Use | None = None,
    *,
    depends_on: torch.Tensor | None = None,
) -> tuple[Copies, torch.Tensor | None]:
    """Cast a local tensor to float8 copies with the statistics of the global tensor.

    Args:
        layout: the layout of the global tensor, without Partial placements.
        source: the source of the statistics. Values above statistics that were not measured at this
            cast saturate.
        use: the operand that the cast makes, for observers; ``None``: they are not notified.
        depends_on: see :func:`fp8_dist.scaling.operators.cast`.

    Returns:
        The copies; and the amax, fp32, 0-dim, if the operand has an amax history.

    Collectives: those of :meth:`Source.statistics`.
    """
    schemes, statistics, is_fresh = plan.schemes, None, source is FRESH
    if isinstance(source, AmaxHistory) and torch.compiler.is_compiling():
        # One operator looks up, casts and measures.
        scale, *flat, own_amax = look_up_in_op(source, x, schemes, layout, plan.of, plan.transposed)
        return _copies(plan, layout, [(scale,)], flat, (0, 0)), own_amax
    reduces = is_fresh and any(reduction.reduction_groups(scheme, layout) for scheme in schemes)
    copies: Copies
    if reduces and len(schemes) > 1:
        # One scheme at a time, so that a graph that needs only one copy does not repeat the
        # reduction of the other.
        copies, amax = _cast_each(x, plan, layout), None
    else:
        if reduces or not is_fresh:
            statistics = source.statistics(x, schemes, layout)
        start = common_start(schemes, layout)
        scales, data, amax = cast(
            x,
            plan,
            statistics,
            start,
            saturate=not is_fresh,
            measures=source.amax_from == "cast",
            depends_on=depends_on,
        )
        if statistics is not None and source.amax_from == "statistic":
            amax = statistics[0][0]
        copies = _copies(plan, layout, scales, data, start)
    if use is not None and observers.is_observed() and schemes[0].levels:  # not in high precision
        observers.notify_cast(use, x, layout, copies)
    return copies, amax


def _copies(
    plan: CastPlan,
    layout: Layout | None,
    scales: Sequence[Scales],
    data: Sequence[torch.Tensor],
    start: Start,
) -> list[Quantized]:
    """Assemble copies from each scheme's scales and each copy's data.

    ``start``: the :func:`fp8_dist.scaling.common_start` of the schemes.
    """
    copies = []
    for i, transposed, qdata in zip(plan.of, plan.transposed, data, strict=True):
        scheme = plan.schemes[i]
        own_start = start if len(plan.schemes) == 1 else scheme.start(layout)
        splits_blocks = layout is not None and scheme.splits_blocks(layout)
        # A transposed copy is a matrix, with rows of zeros up to a multiple of 16.
        matrix = qdata.t() if transposed else qdata
        copies.append(Quantized(matrix, scales[i], scheme, own_start, splits_blocks))
    return copies


def _cast_each(x: torch.Tensor, plan: CastPlan, layout: Layout | None) -> list[Quantized]:
    copies: dict[int, Quantized] = {}
    for i in range(len(plan.schemes)):
        part, places = plan.part(i)
        copies.update(zip(places, cast_local(x, part, layout)[0], strict=True))
    return [copies[n] for n in range(len(plan.of))]


def cast_once(tensor: torch.Tensor, scheme: Scheme) -> Quantized:
    """:func:`cast_local` of the local part of a tensor to one copy."""
    return cast_local(mesh.local_tensor(tensor), CastPlan((scheme,)), Layout.of(tensor))[0][0]


def as_float8(
    tensor: torch.Tensor, scheme: Scheme, source: Source = FRESH, use: Use | None = None
) -> torch.Tensor:
    """Cast a tensor to a Float8Tensor, or a DTensor to a DTensor of one."""
    local, layout = mesh.local_tensor(tensor), Layout.of(tensor)
    (quantized,), amax = cast_local(local, CastPlan((scheme,)), layout, source, use)
    float8 = Float8Tensor.of(quantized, tensor.dtype, amax)
    if use is None and observers.is_observed():
        float8.origin = Original(local.detach(), layout), quantized
    return mesh.with_local(tensor, float8)


def prepare(
    tensor: torch.Tensor,
    operand: Operand,
    gemms: tuple[Gemm, ...],
    placements: Placements | None,
    source: Source,
    owner: Owner,
) -> tuple[Operands, torch.Tensor | None]:
    """Cast an operand for the given GEMMs and redistribute it to ``placements``.

    Args:
        tensor: ``[..., K]``, in high precision or already float8; no Partial placements.
        placements: the placements that the GEMMs need, if ``tensor`` is a DTensor.
        source: the source of the statistics.
        owner: the layer's weight, which has the config.

    Returns:
        The operand of each GEMM; and its local amax, if it was cast with a history.

    Collectives: those of the cast, and of the redistribution.
    """
    recipe = owner.config.recipe
    use = Use((owner,), operand) if observers.is_observed() else None
    if isinstance(high := mesh.local_tensor(tensor), Float8Tensor):
        if use is not None:
            observers.notify_prepared(owner, high)
    elif isinstance(tensor, DTensor):
        schemes = tuple([recipe.uses[operand][gemm] for gemm in gemms])
        scheme = scheme_of_move(tensor, operand, schemes, placements, owner)
        if tuple(tensor.placements) != placements:
            if scheme is not None:
                tensor = as_float8(tensor, scheme, source, use)
            else:
                tensor = tensor.redistribute(placements=placements)
            high = mesh.local_tensor(tensor)
    if isinstance(high, Float8Tensor):
        moved, amax = tensor, high.local_amax
        if isinstance(tensor, DTensor):
            assert placements is not None
            moved = internals.dtensor_local(mesh.redistributed(tensor, placements))
        return dict.fromkeys(gemms, moved), amax
    plan, places = recipe.copies(operand, gemms, tensor.device)
    if not plan.of:
        return dict.fromkeys(gemms, high), None
    local = high if isinstance(tensor, DTensor) else as_matrix(tensor)
    copies, amax = cast_local(local, plan, Layout.of(tensor), source, use)
    pairs = zip(gemms, places, strict=True)
    return {gemm: high if place is None else copies[place] for gemm, place in pairs}, amax


def wait_local(operand: Local, scheme: Scheme | None) -> Local:
    """Wait for an operand that may be in flight; ``scheme``: the scheme of a float8 operand."""
    if isinstance(operand, Quantized):
        return operand
    local = mesh.local_tensor(operand)
    if not isinstance(local, Float8Tensor):
        return local
    assert scheme is not None
    return quantized_as(local, scheme)
