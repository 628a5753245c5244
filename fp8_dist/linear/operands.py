"""Planning, casting and moving the operands of a linear layer's GEMMs.

If one float8 copy serves all GEMMs of an operand, the operand is cast where it is, and moves as
float8. Otherwise it moves in high precision and is cast where it arrives.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from fp8_dist.cast import Copies, as_float8_of, copies_over
from fp8_dist.config import CastSpec, CopySpec, Float8LinearConfig, Gemm, Operand
from fp8_dist.granularity import Granularity
from fp8_dist.kernels import Scaling
from fp8_dist.linear.amax_history import AmaxHistory
from fp8_dist.linear.observing import Owner, is_observed, observe_copies, observe_prepared_use
from fp8_dist.linear.rowwise_folded import folded_gradients
from fp8_dist.linear.shared_input import cast_key, last_cast, note_cast
from fp8_dist.mesh import (
    Layout,
    Placements,
    has_pieces,
    local_tensor,
    sharded_dim,
    with_local,
)
from fp8_dist.tensor import Float8Tensor, Quantized
from fp8_dist.torch_internals import can_skip_dispatch, dtensor_local
from fp8_dist.transport import Encoding
from fp8_dist.warn import warn_once


class LinearSpec(NamedTuple):
    """The arguments of one call of the linear function, except for its tensors."""

    config: Float8LinearConfig
    output_placements: Placements | None
    fqn: str
    histories: Mapping[str, AmaxHistory]
    owner: Owner  # the layer's float8_weight
    record: bool  # whether the forward's casts belong to a training step
    # The granularity of this rank's part of the weight, for scales of blocks.
    weight_blocks: Granularity | None = None
    reduce_transport: Encoding = None  # of the reduce-scatters of the output and of grad_input


class WeightCasts(NamedTuple):
    """The local weight in float8, as a forward takes it.

    Attributes:
        output, grad_input: the copies that these GEMMs take, perhaps the same; ``None``: they take
            the weight in high precision, or by ``recast``.
        recast: (multiplier, scale) of a cast in the backward. The weight is then FSDP2's
            high-precision copy, which FSDP2 frees in between; a float8 copy would outlive it.
    """

    output: Quantized | None = None
    grad_input: Quantized | None = None
    recast: Scaling | None = None


# An operand on this rank, [..., K] or [M, K]: in float8, or a plain tensor in high precision.
Local = Quantized | torch.Tensor
# The operand that each GEMM takes. A tensor may be in flight: see wait_local().
Operands = dict[Gemm, Local]


class OperandPlan(NamedTuple):
    """Plan of an operand's cast and redistribution.

    Attributes:
        first_cast: the one cast for all GEMMs, made before the operand moves; ``None``: the operand
            moves in high precision, and is cast for each GEMM where it arrives.
        moves: the operand is redistributed.
        amax_axes: the mesh axes over which amaxes may be reduced; ``None``: all.
    """

    first_cast: CastSpec | None
    moves: bool
    amax_axes: tuple[int, ...] | None


@lru_cache(maxsize=4096)
def plan_operand(
    casts: tuple[CastSpec | None, ...],
    now: Placements | None,
    then: Placements | None,
    ndim: int,
    amax_scope: str = "global",
) -> OperandPlan:
    """Plan an operand's cast and redistribution from facts that all ranks share.

    Args:
        casts: the cast that each GEMM takes; ``None``: high precision.
        now: the placements of a DTensor operand; ``None`` for a plain tensor.
        then: the placements that the GEMMs need.
        amax_scope: with ``"rank"`` amaxes are reduced only over axes on which float8 data moves.
    """
    axes: tuple[int, ...] = ()
    dims: list[int] = []
    for axis, (p, needed) in enumerate(zip(now or (), then or (), strict=True)):
        dim = sharded_dim(p, ndim)
        if dim is not None and p != needed:
            axes += (axis,)
            dims.append(dim)
    moves, everywhere = now != then, amax_scope == "global"
    # Shards of several pieces are not redistributed as float8.
    first = None if has_pieces(now) else casts[0]
    if first is not None and all(cast == first for cast in casts):
        granularity = first.granularity
        if granularity.can_move(dims, ndim) and (granularity.can_gather or not moves):
            return OperandPlan(first, moves, None if everywhere else axes)
    return OperandPlan(None, moves, None if everywhere else ())


def _plan_of(
    tensor: torch.Tensor,
    operand: Operand,
    casts: tuple[CastSpec | None, ...],
    placements: Placements | None,
    spec: LinearSpec,
) -> OperandPlan:
    now = tuple(tensor.placements) if isinstance(tensor, DTensor) else None
    scope = spec.config.amax_scope
    if torch.compiler.is_compiling():
        # Dynamo warns about functions with a cache.
        return plan_operand.__wrapped__(casts, now, placements, tensor.ndim, scope)
    plan = plan_operand(casts, now, placements, tensor.ndim, scope)
    one_copy = spec.config.gather_cast(operand)
    if plan.first_cast is None and one_copy is not None:
        if has_pieces(now):
            why = (
                "ranks have several pieces of it (_StridedShard); redistribute it to Shard or "
                "Replicate first"
            )
        else:
            why = (
                f"it has one scale per {one_copy.granularity.name} and is sharded along its last "
                "dim (Shard(-1)); shard the sequence or the batch instead (Shard(0), Shard(1)), or "
                "use a recipe with one scale per tensor"
            )
        warn_once(
            f"scales in parts: {operand}",
            f"{spec.fqn}: {operand} is gathered in high precision, because {why}",
        )
    return plan


def prepare_operand(
    tensor: torch.Tensor,
    operand: Operand,
    gemms: tuple[Gemm, ...],
    placements: Placements | None,
    spec: LinearSpec,
) -> Operands:
    """Cast an operand for the given GEMMs, and redistribute it to ``placements``, by its plan.

    Args:
        tensor: ``[..., K]``, in high precision or cast already; no Partial placements.
        placements: the placements of a DTensor that the GEMMs need.
    """
    prepared = local_tensor(tensor)
    if isinstance(prepared, Float8Tensor):
        if is_observed():
            tensor = with_local(tensor, observe_prepared_use(spec.owner, prepared))
        return dict.fromkeys(gemms, _moved(tensor, placements))
    if not isinstance(tensor, DTensor):
        return _cast_here(tensor, operand, gemms, spec, None, tensor)
    casts = tuple(spec.config.cast(operand, gemm) for gemm in gemms)
    plan = _plan_of(tensor, operand, casts, placements, spec)
    if plan.first_cast is not None and plan.moves:
        copy = CopySpec(plan.first_cast)
        quantized = _copies(tensor, operand, (copy,), spec, plan.amax_axes)[copy]
        return dict.fromkeys(gemms, _moved(as_float8_of(tensor, quantized), placements))
    high = local_tensor(tensor)
    if plan.moves:
        high, tensor = _moved_in_high_precision(tensor, placements)
    return _cast_here(tensor, operand, gemms, spec, plan.amax_axes, high)


def _cast_here(
    tensor: torch.Tensor,
    operand: Operand,
    gemms: tuple[Gemm, ...],
    spec: LinearSpec,
    axes: tuple[int, ...] | None,
    high: torch.Tensor,
) -> Operands:
    """Cast an operand for the given GEMMs without moving it; ``high`` is its local tensor."""
    by_gemm = spec.config.copies(operand, tensor.device)
    taken = {gemm: by_gemm.get(gemm) for gemm in gemms}
    wanted = tuple(dict.fromkeys(filter(None, taken.values())))
    made = _copies(tensor, operand, wanted, spec, axes) if wanted else {}
    return {gemm: made[copy] if copy else high for gemm, copy in taken.items()}


def prepare_gradients(
    grad: torch.Tensor,
    placements: Placements | None,
    input: Local | None,
    weight: Local | None,
    spec: LinearSpec,
) -> dict[Gemm, tuple[Local, Local]]:
    """The left and the right operand of each gradient GEMM.

    Args:
        grad: grad_output ``[..., N]``, high precision, no Partial placements.
        placements: the placements of a DTensor that the GEMMs need.
        input: the right operand of grad_weight; None: that GEMM is left out.
        weight: the right operand of grad_input; None: that GEMM is left out.
    """
    right: Operands = {}
    if weight is not None:
        right["grad_input"] = weight
    if input is not None:
        right["grad_weight"] = input
    gemms, folds = tuple(right), {}
    if spec.config.fold_row_scales:
        folds = {gemm: x for gemm, x in right.items() if isinstance(x, Quantized)}
    if not folds:
        left = prepare_operand(grad, "grad_output", gemms, placements, spec)
        return {gemm: (left[gemm], right[gemm]) for gemm in gemms}
    cast = spec.config.cast("grad_output", next(iter(folds)))
    assert cast is not None
    _plan_of(grad, "grad_output", (cast,), placements, spec)  # for its warning
    operands: dict[Gemm, tuple[Local, Local]] = {}
    if len(folds) < len(gemms):
        # One GEMM is in high precision, so grad_output moves in high precision, once.
        high, grad = _moved_in_high_precision(grad, placements)
        operands = {gemm: (high, right[gemm]) for gemm in gemms}
    axes = () if spec.config.amax_scope == "rank" else None
    w, x = folds.get("grad_input"), folds.get("grad_weight")
    second = spec.config.copies("grad_output", grad.device).get("grad_weight")
    transposed = second is not None and second.transposed
    return operands | folded_gradients(grad, cast, placements, w, x, axes, transposed, spec.owner)


def _copies(
    tensor: torch.Tensor,
    operand: Operand,
    copies: tuple[CopySpec, ...],
    spec: LinearSpec,
    axes: tuple[int, ...] | None,
) -> Copies:
    """Float8 copies of the local part of an operand; a plain tensor is cast as a matrix."""
    matrix = tensor if isinstance(tensor, DTensor) else as_matrix(tensor)
    made = _copies_of_matrix(tensor, matrix, operand, copies, spec, axes)
    if not is_observed():
        return made
    repeats = operand == "input"
    high = local_tensor(matrix)
    return observe_copies(spec.owner, operand, high, made, repeats)


def _copies_of_matrix(
    tensor: torch.Tensor,
    matrix: torch.Tensor,
    operand: Operand,
    copies: tuple[CopySpec, ...],
    spec: LinearSpec,
    axes: tuple[int, ...] | None,
) -> Copies:
    """:func:`_copies` without observers; ``matrix`` is a plain ``tensor`` as a matrix."""
    if copies[0].cast.delayed:  # both casts are the same: they have one scale per tensor
        record = spec.record or operand == "grad_output"
        return spec.histories[operand].copies_of(matrix, copies, record)
    power_of_2 = spec.config.round_scales_to_power_of_2
    if operand != "input" or isinstance(tensor, DTensor) or not can_skip_dispatch(tensor):
        return copies_over(matrix, copies, power_of_2, axes)[1]
    key = cast_key(tensor, (copies, power_of_2))
    known = last_cast(tensor, key)
    if known is None:
        known = copies_over(matrix, copies, power_of_2, axes)[1]
        note_cast(tensor, key, known)
    return known


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` as ``[M, K]``."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _moved(tensor: torch.Tensor, placements: Placements | None) -> torch.Tensor:
    """The local tensor at ``placements``, which may be in flight until it is first used."""
    if not isinstance(tensor, DTensor):
        return tensor
    assert placements is not None
    return dtensor_local(redistributed(tensor, placements))


def _moved_in_high_precision(
    tensor: torch.Tensor, placements: Placements | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The local tensor at ``placements``, and the tensor or DTensor that it belongs to."""
    high, layout = local_tensor(_moved(tensor, placements)), Layout.of(tensor)
    if layout is None:
        return high, high
    assert placements is not None
    return high, layout._replace(placements=placements).wrap(high)


def wait_local(operand: Local) -> Local:
    """Wait for an operand that is in flight, and return it."""
    if isinstance(operand, Quantized):
        return operand
    local = local_tensor(operand)
    return Quantized.of(local) if isinstance(local, Float8Tensor) else local


def redistributed(tensor: DTensor, placements: Placements) -> DTensor:
    """A DTensor at other placements; its local tensor may be in flight."""
    if tuple(tensor.placements) == placements:
        return tensor
    return tensor.redistribute(placements=placements, async_op=True)
