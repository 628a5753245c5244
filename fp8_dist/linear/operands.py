"""The operands of a linear layer's GEMMs: what is cast, where it moves, and in which order.

One float8 copy that serves both GEMMs of an operand is made where the operand is, and moves as
float8. Otherwise the operand moves in high precision and is cast where it lands.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from fp8_dist.cast import cast_over, quantize_over
from fp8_dist.casts import Cast, Gemm, Operand
from fp8_dist.config import Float8LinearConfig
from fp8_dist.kernels import Quantized, quantize_dynamic, reduced_dims
from fp8_dist.linear.amax_history import AmaxHistory
from fp8_dist.linear.last_cast import cast_key, last_cast, note_cast
from fp8_dist.linear.rowwise_folded import folded_gradients
from fp8_dist.mesh.layout import Layout, Placements, is_shard, local_tensor
from fp8_dist.tensor.float8_tensor import Float8Tensor
from fp8_dist.torch_internals import can_skip_dispatch, dtensor_local
from fp8_dist.warn import warn_once


class LinearSpec(NamedTuple):
    """Everything about one call of the linear function that is not a tensor."""

    config: Float8LinearConfig
    output_placements: Placements | None
    fqn: str
    histories: Mapping[str, AmaxHistory]
    record: bool  # whether the forward's casts belong to a training step


class WeightCasts(NamedTuple):
    """The local weight in each of its casts (``config.casts("weight")``), as a forward takes it.

    Attributes:
        casts: (qdata, scale) of each, perhaps without the data of those that only the backward
            takes.
        multiplier: the quantization multiplier of the one that the backward takes, where it must
            be cast again there: the weight is FSDP2's, which frees it in between, and a float8
            copy would outlive it.
    """

    casts: tuple[tuple[torch.Tensor | None, torch.Tensor], ...] = ()
    multiplier: torch.Tensor | None = None


class Local(NamedTuple):
    """An operand on this rank.

    (Tuples cost less than Float8Tensors, which need be no tensors here.)

    Attributes:
        data: ``[..., K]``, float8 or high precision.
        scale: fp32, of float8 data.
        has_row_scales: there is one per row. (Else one per column, or one.)
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    has_row_scales: bool = False


# An operand as each GEMM takes it, perhaps in flight: see landed().
Operands = dict[Gemm, torch.Tensor | Local]


def landed(operand: torch.Tensor | Local) -> Local:
    """An operand once it has arrived: waits for it if it is in flight."""
    if isinstance(operand, Local):
        return operand
    local = local_tensor(operand)
    if not isinstance(local, Float8Tensor):
        return Local(local)
    return Local(local.qdata, local.scale, local.covered == (local.ndim - 1,))


def prepare_operand(
    tensor: torch.Tensor,
    operand: Operand,
    gemms: tuple[Gemm, ...],
    placements: Placements | None,
    spec: LinearSpec,
) -> Operands:
    """Cast an operand for the given GEMMs, and bring it to ``placements``.

    One cast that serves all of them is made first and moves as float8. Otherwise the operand moves
    in high precision, once, and is cast where it lands. With ``amax_scope="rank"`` amax is reduced
    only over axes on which the operand moves after its cast.
    """
    config = spec.config
    if not isinstance(tensor, DTensor) and can_skip_dispatch(tensor):
        only = config.travelling_cast(operand)
        if only is not None and only.covers != "column" and not only.delayed:
            qdata, scale = quantize_operand(tensor, operand, config)
            return dict.fromkeys(gemms, Local(qdata, scale, only.covers == "row"))
    casts = {gemm: config.cast(operand, gemm) for gemm in gemms}
    if isinstance(local_tensor(tensor), Float8Tensor):
        return dict.fromkeys(gemms, _move(tensor, placements))
    first = casts[gemms[0]]
    if (
        first is not None
        and set(casts.values()) == {first}
        and _can_travel(first, tensor, placements)
    ):
        axes = _moving_axes(tensor, placements) if config.amax_scope == "rank" else None
        stays = not isinstance(tensor, DTensor) or tuple(tensor.placements) == placements
        if stays and not first.delayed:
            dims = reduced_dims(first.covers, tensor.ndim)
            power_of_2 = config.round_scales_to_power_of_2
            qdata, scale = quantize_over(tensor, first.dtype, dims, power_of_2, axes)
            return dict.fromkeys(gemms, Local(qdata, scale, first.covers == "row"))
        cast = _cast_operand(tensor, operand, first, spec, axes)
        return dict.fromkeys(gemms, _move(cast, placements))
    _warn_of_rows_in_parts(operand, tensor, placements, spec)
    high = local_tensor(_move(tensor, placements))
    layout = Layout.of(tensor)
    if layout is not None:
        assert placements is not None
        tensor = layout._replace(placements=placements).wrap(high)
    made: dict[Cast | None, torch.Tensor] = {None: high}
    for kind in casts.values():
        if kind is not None and kind not in made:
            axes = () if config.amax_scope == "rank" else None
            made[kind] = local_tensor(_cast_operand(tensor, operand, kind, spec, axes))
    return {gemm: made[kind] for gemm, kind in casts.items()}


def quantize_operand(
    tensor: torch.Tensor, operand: Operand, config: Float8LinearConfig
) -> Quantized:
    """The one cast of an operand of one device, by the amaxes that it has now."""
    cast, power_of_2 = config.travelling_cast(operand), config.round_scales_to_power_of_2
    assert cast is not None
    dims = reduced_dims(cast.covers, tensor.ndim)
    if operand != "input":
        return quantize_dynamic(tensor, cast.dtype, dims, power_of_2)[0]
    key = cast_key(tensor, (cast, power_of_2))
    known = last_cast(tensor, key)
    if known is None:
        known, _ = quantize_dynamic(tensor, cast.dtype, dims, power_of_2)
        note_cast(tensor, key, known)
    return known


def _can_travel(cast: Cast, tensor: torch.Tensor, placements: Placements | None) -> bool:
    """Whether an operand may move after its cast: rows with scales of their own move whole."""
    if cast.covers != "row" or not isinstance(tensor, DTensor):
        return cast.covers != "column"
    moving = _moving_axes(tensor, placements) or ()
    return not any(tensor.placements[axis].dim % tensor.ndim == tensor.ndim - 1 for axis in moving)  # type: ignore[attr-defined]


def _warn_of_rows_in_parts(
    operand: Operand,
    tensor: torch.Tensor,
    placements: Placements | None,
    spec: LinearSpec,
) -> None:
    """Say it if an operand that float8 was promised for moves in high precision."""
    cast = spec.config.travelling_cast(operand)
    if cast is None or torch.compiler.is_compiling() or _can_travel(cast, tensor, placements):
        return
    warn_once(
        f"rows in parts: {operand}",
        f"{spec.fqn}: {operand} is gathered in high precision, because its rows, which have a "
        "scale each, are sharded themselves (Shard(-1)); shard the sequence or the batch instead "
        "(Shard(0), Shard(1)), or use a recipe with one scale per tensor",
    )


def _moving_axes(tensor: torch.Tensor, placements: Placements | None) -> tuple[int, ...] | None:
    if not isinstance(tensor, DTensor):
        return None
    assert placements is not None
    pairs = enumerate(zip(tensor.placements, placements, strict=True))
    return tuple(axis for axis, (now, then) in pairs if is_shard(now) and now != then)


def _cast_operand(
    tensor: torch.Tensor,
    operand: Operand,
    cast: Cast,
    spec: LinearSpec,
    axes: tuple[int, ...] | None,
) -> torch.Tensor:
    if cast.delayed:
        record = spec.record or operand == "grad_output"
        return spec.histories[operand].cast(tensor, record)
    power_of_2 = spec.config.round_scales_to_power_of_2
    return cast_over(tensor, cast.dtype, reduced_dims(cast.covers, tensor.ndim), power_of_2, axes)


def prepare_gradient(
    grad: torch.Tensor,
    gemms: tuple[Gemm, ...],
    placements: Placements | None,
    input: Local,
    weight: Local,
    spec: LinearSpec,
) -> Operands:
    """grad_output for the GEMMs; ``input`` and ``weight`` are what it is multiplied by."""
    config = spec.config
    if not config.fold_row_scales:
        return prepare_operand(grad, "grad_output", gemms, placements, spec)
    folds = [gemm for gemm in gemms if config.cast("grad_output", gemm) is not None]
    if not folds:
        return prepare_operand(grad, "grad_output", gemms, placements, spec)
    _warn_of_rows_in_parts("grad_output", grad, placements, spec)
    operands: Operands = {}
    if len(folds) < len(gemms):
        # One GEMM is in high precision: so it moves, once.
        high = local_tensor(_move(grad, placements))
        operands = dict.fromkeys(gemms, high)
        layout = Layout.of(grad)
        if layout is not None:
            assert placements is not None
            grad = layout._replace(placements=placements).wrap(high)
    cast = config.cast("grad_output", folds[0])
    assert cast is not None
    of_weight = weight.scale if "grad_input" in folds else None
    of_input = input.scale if "grad_weight" in folds else None
    axes = () if config.amax_scope == "rank" else None
    return operands | folded_gradients(grad, cast, placements, of_weight, of_input, axes)


def _move(tensor: torch.Tensor, placements: Placements | None) -> torch.Tensor:
    """Local tensor of ``tensor`` at ``placements``; may be in flight until it is first used."""
    if not isinstance(tensor, DTensor):
        return tensor
    assert placements is not None
    return dtensor_local(redistributed(tensor, placements))


def weight_operand(
    weight: torch.Tensor,
    casts: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]],
    gemm: Gemm,
    config: Float8LinearConfig,
) -> Local:
    """The weight for a GEMM; ``casts`` are (qdata, scale) of its casts, in their order."""
    cast = config.cast("weight", gemm)
    if cast is None:
        return Local(local_tensor(weight))
    qdata, scale = casts[config.casts("weight").index(cast)]
    assert qdata is not None
    return Local(qdata, scale)


def redistributed(tensor: DTensor, placements: Placements) -> DTensor:
    """A DTensor at other placements; what moves may be in flight."""
    if tuple(tensor.placements) == placements:
        return tensor
    return tensor.redistribute(placements=placements, async_op=True)
