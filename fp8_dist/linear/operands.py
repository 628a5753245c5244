"""Casts and redistributions of the operands of a linear layer's GEMMs.

If one float8 copy serves all GEMMs of an operand, the operand is cast first and moved as float8.
Otherwise it is moved in high precision and cast where it arrives.

An input that several layers share (``wq``, ``wk`` and ``wv``) is cast once, and one copy is saved
for backward.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from fp8_dist import mesh
from fp8_dist import torch_internals as internals
from fp8_dist.cast import Copies, as_float8_of, cast_local_copies
from fp8_dist.config import Float8LinearConfig
from fp8_dist.device import current_stream, is_captured
from fp8_dist.kernels.quantization import as_matrix
from fp8_dist.linear.amax_history import PREPARED_INPUT, AmaxHistory
from fp8_dist.linear.observing import Owner, Source, is_observed, observe, observe_prepared
from fp8_dist.linear.rowwise_folded import folded_gradients
from fp8_dist.mesh import Layout, Placements
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import CastPlan, Quantized, Scheme, Start, Statistics, cast
from fp8_dist.tensor import Float8Tensor, quantized_as, scales_of
from fp8_dist.tensor.stored import StoredFloat8
from fp8_dist.text import warn_once
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
    reduce_transport: Encoding = None  # for sums of the output and grad_input over ranks


class Recast(NamedTuple):
    """A cast of the local weight that the backward makes, and the global statistics for it.

    A weight that is stored in packed form is only unpacked, and ``statistics`` are its scales.
    """

    statistics: Statistics
    scheme: Scheme
    start: Start
    splits_blocks: bool

    def cast(self, local: torch.Tensor, after: torch.Tensor | None = None) -> Quantized:
        """Cast the local weight; ``after``: ``depends_on`` of :func:`fp8_dist.scaling.cast`."""
        if isinstance(local, StoredFloat8):
            qdata, scales = local.unpacked(self.scheme, after), self.statistics
        else:
            plan = CastPlan((self.scheme,))
            (scales,), (qdata,) = cast(local, plan, [self.statistics], self.start, depends_on=after)
        return Quantized(qdata, scales, self.scheme, self.start, self.splits_blocks)


class WeightCasts(NamedTuple):
    """The float8 copies of the local weight for a forward and its backward.

    Attributes:
        output, grad_input: the copies that these GEMMs take, which may be the same copy. ``None``
            means that the GEMM takes the weight in high precision, or what ``recast`` makes.
        recast: the cast for grad_input, if it is made in the backward. The weight is then stored in
            packed form, or it is FSDP2's unsharded high-precision parameter, which FSDP2 frees
            between forward and backward: a float8 copy would outlive it.
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


@internals.cached_but_in_graphs
def scheme_of_move(
    schemes: tuple[Scheme | None, ...],
    placements: Placements,
    target: Placements | None,
    ndim: int,
) -> Scheme | None:
    """The scheme by which an operand is cast for all GEMMs before it is redistributed.

    ``None`` if it moves in high precision. The result depends only on facts that all ranks share.

    Args:
        schemes: the scheme that each GEMM takes, or ``None`` for high precision.
        placements: the placements of the operand, a DTensor.
        target: the placements that the GEMMs need.
    """
    first = schemes[0]
    # Shards that consist of several pieces are not redistributed as float8.
    if (
        first is None
        or mesh.has_strided_placements(placements)
        or any(scheme != first for scheme in schemes)
    ):
        return None
    pairs = zip(placements, target or (), strict=True)
    changed = [mesh.sharded_dim(now, ndim) for now, needed in pairs if now != needed]
    can_move = first.can_move([dim for dim in changed if dim is not None], ndim)
    return first if can_move and (first.can_gather or placements == target) else None


def checked_scheme_of_move(
    tensor: DTensor,
    operand: Operand,
    schemes: tuple[Scheme | None, ...],
    target: Placements | None,
    config: Float8LinearConfig,
    fqn: str,
) -> Scheme | None:
    """Run :func:`scheme_of_move`, and warn if placements prevent a move in float8."""
    placements = tuple(tensor.placements)
    scheme = scheme_of_move(schemes, placements, target, tensor.ndim)
    gathered = config.recipe.gather_scheme[operand]
    if scheme is None and gathered is not None and not torch.compiler.is_compiling():
        warn_once(
            f"scales in parts: {operand}",
            f"{fqn}: {operand} is gathered in high precision, because "
            f"{reason_to_move_high(gathered, placements, tensor.ndim)}",
        )
    return scheme


def reason_to_move_high(scheme: Scheme, placements: Placements | None, ndim: int) -> str:
    """The reason why an operand does not move in float8 with this scheme, and what to do."""
    if mesh.has_strided_placements(placements):
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
    """Cast an operand for the given GEMMs and redistribute it to ``placements``.

    Args:
        tensor: ``[..., K]``, in high precision or already float8; no Partial placements.
        placements: the placements that the GEMMs need, if ``tensor`` is a DTensor.
    """
    high = mesh.local_tensor(tensor)
    if isinstance(high, Float8Tensor):
        amaxes: Amaxes = {}
        if spec.prepared_input is not None and spec.training:
            value = spec.prepared_input.last_of(scales_of(high)[0])
            amaxes = {} if value is None else {PREPARED_INPUT: value}
        if is_observed():
            observe_prepared(spec.owner, high)
        return dict.fromkeys(gemms, _moved(tensor, placements)), amaxes
    if isinstance(tensor, DTensor):
        schemes = tuple([spec.config.recipe.uses[operand][gemm] for gemm in gemms])
        scheme = checked_scheme_of_move(tensor, operand, schemes, placements, spec.config, spec.fqn)
        if tuple(tensor.placements) != placements:
            if scheme is not None:
                (cast,), amaxes = _cast_operand(tensor, operand, CastPlan((scheme,)), spec)
                return dict.fromkeys(gemms, _moved(as_float8_of(tensor, cast), placements)), amaxes
            tensor = tensor.redistribute(placements=placements)
            high = mesh.local_tensor(tensor)
    plan, places = spec.config.recipe.copies(operand, gemms, tensor.device)
    copies, amaxes = _cast_operand(tensor, operand, plan, spec) if plan.of else ((), {})
    return {
        gemm: high if place is None else copies[place]
        for gemm, place in zip(gemms, places, strict=True)
    }, amaxes


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
    operands: dict[Gemm, Local | None] = {"grad_input": weight, "grad_weight": input}
    right = {gemm: operand for gemm, operand in operands.items() if operand is not None}
    gemms, folds = tuple(right), {}
    if spec.config.recipe.folds:
        folds = {gemm: operand for gemm, operand in right.items() if isinstance(operand, Quantized)}
    if not folds:
        left, amaxes = prepare_operand(grad, "grad_output", gemms, placements, spec)
        return {gemm: (left[gemm], right[gemm]) for gemm in gemms}, amaxes
    scheme = spec.config.recipe.uses["grad_output"][next(iter(folds))]
    assert scheme is not None
    if isinstance(grad, DTensor):
        # Called only for its warning.
        checked_scheme_of_move(grad, "grad_output", (scheme,), placements, spec.config, spec.fqn)
    pairs: dict[Gemm, tuple[Local, Local]] = {}
    if len(folds) < len(gemms):
        # One GEMM is in high precision, so grad_output is moved once, in high precision.
        if isinstance(grad, DTensor) and grad.placements != placements:
            grad = grad.redistribute(placements=placements)
        pairs = {gemm: (mesh.local_tensor(grad), right[gemm]) for gemm in gemms}
    plan, _ = spec.config.recipe.copies("grad_output", ("grad_weight",), grad.device)
    transposed = any(plan.transposed)
    return pairs | folded_gradients(grad, scheme, placements, folds, transposed, spec.owner), {}


def _cast_operand(
    tensor: torch.Tensor, operand: Operand, plan: CastPlan, spec: LinearSpec
) -> tuple[Copies, Amaxes]:
    """Cast the local part of an operand to float8 copies. A plain tensor is cast as a matrix."""
    layout = Layout.of(tensor)
    local = as_matrix(tensor) if layout is None else mesh.local_tensor(tensor)
    history, is_input = spec.histories.get(operand), operand == "input"
    amaxes: Amaxes = {}
    if history is not None:
        copies, amaxes[operand] = history.copies_of(local, layout, plan)
    elif is_input and layout is None:
        copies = cast_input(tensor, plan)
    else:
        copies = cast_local_copies(local, plan, layout)
    if is_observed():
        observe(spec.owner, operand, Source(local, layout), copies, is_input)
    return copies, amaxes


def cast_input(x: torch.Tensor, plan: CastPlan) -> Copies:
    """Cast a plain input as a matrix, or return the cached copies of the same values."""
    key = _cache_key(x)
    if key is None:
        return cast_local_copies(as_matrix(x), plan)
    cached = _look_up_cast(x, key)
    if cached is not None and plan.begins(cached[0]):
        return cached[1][: len(plan.of)]
    copies = cast_local_copies(as_matrix(x), plan)
    _cache_cast(x, key, plan, copies)
    return copies


class _CachedCast(NamedTuple):
    """The float8 copies of an input, cached until autograd frees the one that it saved."""

    source: ReferenceType[torch.Tensor]  # only compared by identity
    key: Any
    plan: CastPlan
    unsaved: Copies  # the copies that only the forward takes
    data: ReferenceType[torch.Tensor]
    saved: Quantized  # the saved copy, with a scale in place of its data


_cached_cast: _CachedCast | None = None  # the last cast


def _cache_key(x: torch.Tensor) -> Any:
    """The key that identifies a cast of a tensor or its views; None if it can't be cached."""
    if not internals.can_skip_dispatch(x) or is_captured(x):  # a CUDA graph must contain the cast
        return None
    if (version := internals.version_of(x)) is None:
        return None
    shape = (x.numel(), x.shape[-1]) if x.is_contiguous() else (x.shape, x.stride())
    return version, shape, x.storage_offset(), x.dtype, current_stream(x.device)


def _look_up_cast(x: torch.Tensor, key: Any) -> tuple[CastPlan, Copies] | None:
    """The plan and the copies that are cached for ``x`` and this key, if they still exist."""
    cached = _cached_cast  # another thread may replace it
    if cached is None or cached.source() is not internals.base_of(x) or cached.key != key:
        return None
    if (data := cached.data()) is None:
        return None
    # TensorWeakRef revives the Python object of a tensor that only autograd still owns.
    saved = cached.saved._replace(qdata=TensorWeakRef(data)())
    return cached.plan, (*cached.unsaved, saved)


def _cache_cast(x: torch.Tensor, key: Any, plan: CastPlan, copies: Copies) -> None:
    """Cache the copies of ``x``. Autograd saves the last of them."""
    global _cached_cast
    *unsaved, saved = copies
    data = ref(saved.qdata, _drop_cast)
    saved = saved._replace(qdata=saved.scales[0])
    _cached_cast = _CachedCast(ref(internals.base_of(x)), key, plan, unsaved, data, saved)


def _drop_cast(data: ReferenceType[torch.Tensor]) -> None:
    """Drop the copies once autograd has freed the one that it saved."""
    global _cached_cast
    cached = _cached_cast
    if cached is not None and cached.data is data:
        _cached_cast = None


def _moved(tensor: torch.Tensor, placements: Placements | None) -> torch.Tensor:
    """Redistribute to ``placements``, and return the local tensor, which may be in flight."""
    if not isinstance(tensor, DTensor):
        return tensor
    assert placements is not None
    return internals.dtensor_local(mesh.redistributed(tensor, placements))


def wait_local(operand: Local, scheme: Scheme | None) -> Local:
    """Wait for an operand that may be in flight; ``scheme``: the scheme of a float8 operand."""
    if isinstance(operand, Quantized):
        return operand
    local = mesh.local_tensor(operand)
    if not isinstance(local, Float8Tensor):
        return local
    assert scheme is not None
    return quantized_as(local, scheme)
