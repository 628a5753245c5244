"""Preparation of operands: cast, move, or both.

:func:`cast_local` is the only caller of a scheme's cast. If one float8 copy serves all GEMMs of an
operand, the operand is cast first and moved as float8. Otherwise it is moved in high precision and
cast where it arrives.
"""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from fp8_dist import mesh
from fp8_dist.kernels.quantization import as_matrix
from fp8_dist.mesh import Layout, Placements
from fp8_dist.operand import observers
from fp8_dist.operand.history import AmaxHistory
from fp8_dist.operand.moves import scheme_of_move
from fp8_dist.operand.observers import Original, Owner, Use
from fp8_dist.operand.state import State, look_up_in_op, measured
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import CastPlan, Quantized, Scales, Scheme, Statistics
from fp8_dist.scaling.operators import cast, cast_in_graph
from fp8_dist.tensor import Float8Tensor, quantized_as

# The float8 copies of a local tensor, in the order of their plan.
Copies = Sequence[Quantized]
# An operand on this rank, [..., K] or [M, K]: in float8, or a plain tensor in high precision.
Local = Quantized | torch.Tensor


def cast_local(
    x: torch.Tensor,
    plan: CastPlan,
    statistics: Sequence[Statistics] | None = None,
    use: Use | None = None,
    *,
    measures: bool = False,
    depends_on: torch.Tensor | None = None,
) -> tuple[Copies, torch.Tensor | None]:
    """Cast a local tensor to float8 copies with the statistics of the global tensor.

    Args:
        plan: the copies, and the layout of the global tensor.
        statistics: the global statistics for each scheme of the plan. Values above them saturate.
            ``None``: they are measured.
        use: the operand that the cast makes, for observers; ``None``: they are not notified.
        measures: also measure the tensor, for an amax history. The scale is NaN if the tensor has
            a value that is not finite.
        depends_on: see :func:`fp8_dist.scaling.operators.cast_in_graph`.

    Returns:
        The copies; and, if the cast ``measures``, the local amax, fp32, 0-dim.

    Collectives: without statistics, those of :func:`fp8_dist.operand.state.measured`.
    """
    saturate = statistics is not None
    if statistics is None and plan.needs_ranks:
        if len(plan.schemes) > 1:
            # One scheme at a time, so that a graph that needs only one copy does not repeat the
            # reduction of the other.
            return _cast_each(x, plan, use), None
        statistics = measured(x, plan)
    if torch.compiler.is_compiling():
        found = cast_in_graph(x, plan, statistics, saturate, measures, depends_on)
    else:
        found = cast(x, plan, statistics, saturate, measures)
    scales, data, amax = found
    copies = _copies(plan, scales, data)
    if use is not None:
        observers.notify_cast(use, x, plan.layout, copies)
    return copies, amax


def cast_by_state(
    x: torch.Tensor, plan: CastPlan, state: State | None, use: Use | None = None
) -> tuple[Copies, torch.Tensor | None]:
    """:func:`cast_local` with statistics that Python state decides; ``None``: there is none.

    Returns:
        The copies; and the local amax, fp32, 0-dim, if the operand has an amax history.
    """
    if state is None:
        return cast_local(x, plan, None, use)
    if isinstance(state, AmaxHistory) and torch.compiler.is_compiling():
        # One operator looks up, casts and measures.
        scale, *data, own_amax = look_up_in_op(state, x, plan, casts=True)
        return _copies(plan, [(scale,)], data), own_amax
    statistics = state.statistics(x, plan)
    copies, amax = cast_local(x, plan, statistics, use, measures=state.amax_from == "cast")
    if state.amax_from == "statistic":
        amax = statistics[0][0]
    return copies, amax


def _copies(
    plan: CastPlan, scales: Sequence[Scales], data: Sequence[torch.Tensor]
) -> list[Quantized]:
    """Assemble copies from each scheme's scales and each copy's data."""
    copies = []
    for n, (i, qdata) in enumerate(zip(plan.of, data, strict=True)):
        if plan.transposed[n]:
            # The matrix [K, P], with rows of zeros up to a multiple of 16.
            qdata = qdata.t()
        if plan.layout is None:
            copy = Quantized(qdata, scales[i], plan.schemes[i])
        else:
            position = plan.starts[n], plan.splits_blocks[n]
            copy = Quantized(qdata, scales[i], plan.schemes[i], *position)
        copies.append(copy)
    return copies


def _cast_each(x: torch.Tensor, plan: CastPlan, use: Use | None) -> list[Quantized]:
    copies: dict[int, Quantized] = {}
    for i in range(len(plan.schemes)):
        part, indices = plan.part(i)
        copies.update(zip(indices, cast_local(x, part)[0], strict=True))
    in_order = [copies[n] for n in range(len(plan.of))]
    if use is not None:
        observers.notify_cast(use, x, plan.layout, in_order)
    return in_order


def cast_once(tensor: torch.Tensor, scheme: Scheme) -> Quantized:
    """:func:`cast_local` of the local part of a tensor to one copy."""
    plan = CastPlan((scheme,)).on(Layout.of(tensor))
    return cast_local(mesh.local_tensor(tensor), plan)[0][0]


def as_float8(
    tensor: torch.Tensor, scheme: Scheme, history: AmaxHistory | None = None, use: Use | None = None
) -> torch.Tensor:
    """Cast a tensor to a Float8Tensor, or a DTensor to a DTensor of one."""
    local, layout = mesh.local_tensor(tensor), Layout.of(tensor)
    (quantized,), amax = cast_by_state(local, CastPlan((scheme,)).on(layout), history, use)
    float8 = Float8Tensor.of(quantized, tensor.dtype, amax)
    if use is None and observers.is_observed():
        float8.origin = Original(local.detach(), layout), quantized
    return mesh.with_local(tensor, float8)


def prepare(
    tensor: torch.Tensor,
    operand: Operand,
    gemms: tuple[Gemm, ...],
    placements: Placements | None,
    history: AmaxHistory | None,
    owner: Owner,
) -> tuple[Sequence[Local], torch.Tensor | None]:
    """Cast an operand for the given GEMMs and redistribute it to ``placements``.

    Args:
        tensor: ``[..., K]``, in high precision or already float8; no Partial placements.
        placements: the placements that the GEMMs need, if ``tensor`` is a DTensor.
        history: the amax history of a DELAYED scale.
        owner: the layer's weight, which has the config.

    Returns:
        The operand of each GEMM; and its local amax, if it was cast with a history.

    Collectives: those of the cast, and of the redistribution.
    """
    recipe = owner.config.recipe
    use = Use((owner,), operand) if observers.is_observed() else None
    local = mesh.local_tensor(tensor)
    if isinstance(local, Float8Tensor):
        if use is not None:
            observers.notify_prepared(owner, local)
    elif isinstance(tensor, DTensor):
        schemes = tuple([recipe.uses[operand][gemm] for gemm in gemms])
        scheme = scheme_of_move(tensor, operand, schemes, placements, owner)
        if tuple(tensor.placements) != placements:
            if scheme is not None:
                tensor = as_float8(tensor, scheme, history, use)
            else:
                tensor = tensor.redistribute(placements=placements)
            local = mesh.local_tensor(tensor)
    if isinstance(local, Float8Tensor):
        scheme, amax = recipe.uses[operand][gemms[0]], local.local_amax
        assert scheme is not None
        if isinstance(tensor, DTensor):
            assert placements is not None
            local = mesh.local_tensor(mesh.redistributed(tensor, placements))
            assert isinstance(local, Float8Tensor)
        return [quantized_as(local, scheme)] * len(gemms), amax
    plan = recipe.plan(operand, gemms, local.device)
    if not plan.of:
        return [local] * len(gemms), None
    if isinstance(tensor, DTensor):
        matrix, plan = local, plan.on(Layout.of(tensor))
    else:
        matrix = as_matrix(local)
    copies, amax = cast_by_state(matrix, plan, history, use)
    operands: list[Local] = []
    for place in plan.places:
        operands.append(local if place is None else copies[place])
    return operands, amax
