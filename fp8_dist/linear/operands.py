"""Planning, casting and moving the operands of a linear layer's GEMMs.

If one float8 copy serves all GEMMs of an operand, the operand is cast first and moved as float8.
Otherwise it is moved in high precision and cast where it arrives.

An input that several layers share (``wq``, ``wk`` and ``wv``) is cast once, and one copy is saved
for backward, just as nn.Linear layers save a shared input once.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from fp8_dist.cast import Copies, as_float8_of, cast_copies
from fp8_dist.config import Float8LinearConfig
from fp8_dist.device import current_stream, is_captured
from fp8_dist.kernels.quantization import as_matrix
from fp8_dist.linear.amax_history import PREPARED_INPUT, AmaxHistory
from fp8_dist.linear.observing import Owner, Source, is_observed, observe, observe_prepared
from fp8_dist.linear.rowwise_folded import folded_gradients
from fp8_dist.mesh import Layout, Placements, has_pieces, local_tensor, redistributed, sharded_dim
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import CastPlan, Quantized, Scheme, Start, Statistics, cast
from fp8_dist.tensor import Float8Tensor, quantized_as, scales_of
from fp8_dist.tensor.stored import StoredFloat8
from fp8_dist.text import warn_once
from fp8_dist.torch_internals import (
    base_of,
    cached_but_in_graphs,
    can_skip_dispatch,
    dtensor_local,
    version_of,
)
from fp8_dist.transport import Encoding


class LinearSpec(NamedTuple):
    """The arguments of one call of the linear function, except for its tensors."""

    config: Float8LinearConfig
    output_placements: Placements | None
    fqn: str
    histories: Mapping[str, AmaxHistory]
    owner: Owner  # the layer's float8_weight
    training: bool  # whether a backward may follow the forward
    prepared_input: AmaxHistory | None  # the amax history of an input that layers share
    reduce_transport: Encoding = None  # of the sums of the output and of grad_input


class Recast(NamedTuple):
    """Description of a cast of the local weight in the backward, with known global statistics.

    A weight that is stored in packed form is only unpacked; ``statistics`` are its scales.
    """

    statistics: Statistics
    scheme: Scheme
    start: Start
    is_cut: bool

    def cast(self, local: torch.Tensor, after: torch.Tensor | None = None) -> Quantized:
        """Cast the local weight; ``after``: as in :func:`fp8_dist.scaling.cast`."""
        if isinstance(local, StoredFloat8):
            qdata = local.unpacked(self.scheme, after)
            return Quantized(qdata, self.statistics, self.scheme, self.start, self.is_cut)
        plan, known = CastPlan((self.scheme,)), [self.statistics]
        (scales,), (qdata,) = cast(local, plan, known, self.start, after=after)
        return Quantized(qdata, scales, self.scheme, self.start, self.is_cut)


class WeightCasts(NamedTuple):
    """The local weight in float8, as a forward takes it.

    Attributes:
        output, grad_input: the copies that these GEMMs take, which may be the same copy. ``None``
            means that the GEMM takes the weight in high precision, or by ``recast``.
        recast: the cast for grad_input, if it is made in the backward. The weight is then FSDP2's
            unsharded high-precision parameter, which FSDP2 frees between forward and backward, and
            a float8 copy would outlive it; or it is stored in packed form.
    """

    output: Quantized | None = None
    grad_input: Quantized | None = None
    recast: Recast | None = None


# An operand on this rank, [..., K] or [M, K]: in float8, or a plain tensor in high precision.
Local = Quantized | torch.Tensor
# The operand that each GEMM takes. A tensor may be in flight: see wait_local().
Operands = dict[Gemm, Local]
# The local amax of an operand whose scale is DELAYED, by the name of its history; else empty.
Amaxes = dict[str, torch.Tensor]


class OperandPlan(NamedTuple):
    """Plan of an operand's cast and redistribution."""

    # The one scheme for all GEMMs, with which the operand is cast before it is moved. None: it is
    # moved in high precision, and then cast for each GEMM.
    first: Scheme | None
    moves: bool  # whether it is redistributed


@cached_but_in_graphs
def plan_operand(
    schemes: tuple[Scheme | None, ...],
    now: Placements,
    then: Placements | None,
    ndim: int,
) -> OperandPlan:
    """Plan an operand's cast and redistribution from facts that all ranks share.

    Args:
        schemes: the scheme that each GEMM takes, or ``None`` for high precision.
        now: the placements of the operand, a DTensor.
        then: the placements that the GEMMs need.
    """
    pairs = zip(now, then or (), strict=True)
    changed = [sharded_dim(p, ndim) for p, needed in pairs if p != needed]
    moves = now != then
    # Shards that consist of several pieces are not redistributed as float8.
    first = None if has_pieces(now) else schemes[0]
    if first is not None and not (
        all(scheme == first for scheme in schemes)
        and first.can_move([dim for dim in changed if dim is not None], ndim)
        and (first.can_gather or not moves)
    ):
        first = None
    return OperandPlan(first, moves)


def planned(
    tensor: DTensor,
    operand: Operand,
    schemes: tuple[Scheme | None, ...],
    placements: Placements | None,
    config: Float8LinearConfig,
    fqn: str,
) -> OperandPlan:
    """Run :func:`plan_operand`, and warn of an operand that can't move in float8 as it stands."""
    now = tuple(tensor.placements)
    plan = plan_operand(schemes, now, placements, tensor.ndim)
    one_copy = config.recipe.gather_scheme[operand]
    if plan.first is None and one_copy is not None and not torch.compiler.is_compiling():
        warn_once(
            f"scales in parts: {operand}",
            f"{fqn}: {operand} is gathered in high precision, because "
            f"{reason_to_move_high(one_copy, now, tensor.ndim)}",
        )
    return plan


def reason_to_move_high(scheme: Scheme, placements: Placements | None, ndim: int) -> str:
    """The reason why an operand does not move in float8 with this scheme, and what to do."""
    if has_pieces(placements):
        return (
            "ranks have several pieces of it (_StridedShard); redistribute it to Shard or "
            "Replicate first"
        )
    other = "use a recipe with one scale per tensor"
    if scheme.can_move((0,), ndim):  # only the last dim is in the way
        other = f"shard the sequence or the batch instead (Shard(0), Shard(1)), or {other}"
    placed = list(placements or ())
    return f"float8 with one scale per {scheme.covers} can't be moved from {placed}; {other}"


def prepare_operand(
    tensor: torch.Tensor,
    operand: Operand,
    gemms: tuple[Gemm, ...],
    placements: Placements | None,
    spec: LinearSpec,
) -> tuple[Operands, Amaxes]:
    """Cast an operand for the given GEMMs and redistribute it to ``placements``, as planned.

    Args:
        tensor: ``[..., K]``, in high precision or already float8; no Partial placements.
        placements: the placements that the GEMMs need, if ``tensor`` is a DTensor.
    """
    high = local_tensor(tensor)
    if isinstance(high, Float8Tensor):
        amaxes: Amaxes = {}
        if spec.prepared_input is not None and spec.training:
            value = spec.prepared_input.last_of(scales_of(high)[0])
            amaxes = {} if value is None else {PREPARED_INPUT: value}
        if is_observed():
            observe_prepared(spec.owner, high)
        return dict.fromkeys(gemms, _moved(tensor, placements)), amaxes
    if isinstance(tensor, DTensor):
        uses = spec.config.recipe.uses[operand]
        schemes = tuple([uses[gemm] for gemm in gemms])
        plan = planned(tensor, operand, schemes, placements, spec.config, spec.fqn)
        if plan.first is not None and plan.moves:
            wanted = CastPlan((plan.first,))
            (cast,), amaxes = _copies(tensor, operand, wanted, spec)
            return dict.fromkeys(gemms, _moved(as_float8_of(tensor, cast), placements)), amaxes
        if plan.moves:
            tensor = tensor.redistribute(placements=placements)
            high = local_tensor(tensor)
    wanted, places = spec.config.recipe.copies(operand, gemms, tensor.device)
    made, amaxes = _copies(tensor, operand, wanted, spec) if wanted.of else ((), {})
    each = zip(gemms, places, strict=True)
    return {gemm: high if place is None else made[place] for gemm, place in each}, amaxes


def prepare_gradients(
    grad: torch.Tensor,
    placements: Placements | None,
    input: Local | None,
    weight: Local | None,
    spec: LinearSpec,
) -> tuple[dict[Gemm, tuple[Local, Local]], Amaxes]:
    """Prepare the left and the right operand of each gradient GEMM.

    Args:
        grad: grad_output ``[..., N]``, high precision, no Partial placements.
        placements: the placements that the GEMMs need, if ``grad`` is a DTensor.
        input: the right operand of grad_weight; None if that GEMM is left out.
        weight: the right operand of grad_input; None if that GEMM is left out.
    """
    both: dict[Gemm, Local | None] = {"grad_input": weight, "grad_weight": input}
    right = {gemm: x for gemm, x in both.items() if x is not None}
    gemms, folds = tuple(right), {}
    if spec.config.recipe.folds:
        folds = {gemm: x for gemm, x in right.items() if isinstance(x, Quantized)}
    if not folds:
        left, amaxes = prepare_operand(grad, "grad_output", gemms, placements, spec)
        return {gemm: (left[gemm], right[gemm]) for gemm in gemms}, amaxes
    scheme = spec.config.recipe.uses["grad_output"][next(iter(folds))]
    assert scheme is not None
    if isinstance(grad, DTensor):
        # For its warning.
        planned(grad, "grad_output", (scheme,), placements, spec.config, spec.fqn)
    operands: dict[Gemm, tuple[Local, Local]] = {}
    if len(folds) < len(gemms):
        # One GEMM is in high precision, so grad_output is moved once, in high precision.
        if isinstance(grad, DTensor) and grad.placements != placements:
            grad = grad.redistribute(placements=placements)
        operands = {gemm: (local_tensor(grad), right[gemm]) for gemm in gemms}
    wanted, _ = spec.config.recipe.copies("grad_output", ("grad_weight",), grad.device)
    transposed = any(wanted.transposed)
    folded = folded_gradients(grad, scheme, placements, folds, transposed, spec.owner)
    return operands | folded, {}


def _copies(
    tensor: torch.Tensor, operand: Operand, plan: CastPlan, spec: LinearSpec
) -> tuple[Copies, Amaxes]:
    """Cast the local part of an operand to float8 copies. A plain tensor is cast as a matrix."""
    matrix = tensor if isinstance(tensor, DTensor) else as_matrix(tensor)
    history, is_input = spec.histories.get(operand), operand == "input"
    amaxes: Amaxes = {}
    if history is not None:
        made, amaxes[operand] = history.copies_of(matrix, plan)
    elif is_input and not isinstance(tensor, DTensor):
        made = cast_input(tensor, plan)
    else:
        made = cast_copies(matrix, plan)
    if is_observed():
        source = Source(local_tensor(matrix), Layout.of(matrix))
        observe(spec.owner, operand, source, made, is_input)
    return made, amaxes


def cast_input(x: torch.Tensor, plan: CastPlan) -> Copies:
    """Cast a plain input as a matrix, unless autograd keeps the last cast, of the same values."""
    if not can_skip_dispatch(x):
        return cast_copies(as_matrix(x), plan)
    key = _cast_key(x)
    known = _known_cast(x, key)
    if known is not None and plan.begins(known[0]):
        return known[1][: len(plan.of)]
    made = cast_copies(as_matrix(x), plan)
    if key is not None:
        _note_cast(x, key, plan, made)
    return made


class _Noted(NamedTuple):
    """The copies of an input that was cast, as long as autograd keeps the one it saves."""

    source: ReferenceType[torch.Tensor]  # only compared by identity
    key: Any
    plan: CastPlan
    first: Copies  # the copies that only the forward takes
    data: ReferenceType[torch.Tensor]
    rest: Quantized  # the saved copy, with a scale in place of its data


_noted: _Noted | None = None  # the last cast


def _cast_key(x: torch.Tensor) -> Any:
    """The key of a cast among the casts of a tensor and its views; None if it can't be reused."""
    version = version_of(x)
    if version is None or is_captured(x):
        return None  # a CUDA graph must hold the cast itself
    shape = (x.numel(), x.shape[-1]) if x.is_contiguous() else (x.shape, x.stride())
    return version, shape, x.storage_offset(), x.dtype, current_stream(x.device)


def _known_cast(x: torch.Tensor, key: Any) -> tuple[CastPlan, Copies] | None:
    """The plan and the copies noted for ``x`` and this key, if they still exist."""
    noted = _noted  # another thread may replace it
    if noted is None or noted.source() is not base_of(x) or noted.key != key:
        return None
    if (data := noted.data()) is None:
        return None
    # TensorWeakRef revives the Python object of a tensor that only autograd still owns.
    saved = noted.rest._replace(qdata=TensorWeakRef(data)())
    return noted.plan, (*noted.first, saved)


def _note_cast(x: torch.Tensor, key: Any, plan: CastPlan, copies: Copies) -> None:
    """Note the copies of ``x``. Autograd saves the last of them."""
    global _noted
    *first, saved = copies
    rest = saved._replace(qdata=saved.scales[0])
    _noted = _Noted(ref(base_of(x)), key, plan, first, ref(saved.qdata, _forget), rest)


def _forget(dead: ReferenceType[torch.Tensor]) -> None:
    """Drop the copies once autograd has freed the one that it saved."""
    global _noted
    noted = _noted
    if noted is not None and noted.data is dead:
        _noted = None


def _moved(tensor: torch.Tensor, placements: Placements | None) -> torch.Tensor:
    """Redistribute to ``placements``, and return the local tensor, which may be in flight."""
    if not isinstance(tensor, DTensor):
        return tensor
    assert placements is not None
    return dtensor_local(redistributed(tensor, placements))


def wait_local(operand: Local, scheme: Scheme | None) -> Local:
    """Wait for an operand that may be in flight; ``scheme`` is that of a float8 one."""
    if isinstance(operand, Quantized):
        return operand
    local = local_tensor(operand)
    if not isinstance(local, Float8Tensor):
        return local
    assert scheme is not None
    return quantized_as(local, scheme)
