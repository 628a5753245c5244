"""Cast of an input to the one float8 copy that several layers read."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fp8_dist.cast import as_float8_of, quantize_over
from fp8_dist.config import CastSpec, CopySpec
from fp8_dist.dtypes import autocast
from fp8_dist.linear.amax_history import AmaxHistory
from fp8_dist.linear.module import Float8Linear
from fp8_dist.linear.observing import Owner, is_observed, observe_prepared_cast
from fp8_dist.mesh import has_pieces, local_tensor, reduced, sharded_dim
from fp8_dist.tensor.float8_tensor import Float8Tensor
from fp8_dist.warn import warn_once


def shared_input_cast(layer: Float8Linear) -> tuple[CastSpec, bool] | None:
    """Return the input's cast, and whether its scales are rounded to powers of 2.

    None: no single float8 copy of the input serves both GEMMs.
    """
    cast = layer.config.gather_cast("input")
    return None if cast is None else (cast, layer.config.round_scales_to_power_of_2)


def cast_input(
    x: Any,
    layout: Placement | None,
    mesh: DeviceMesh,
    cast: CastSpec,
    power_of_2: bool,
    history: AmaxHistory | None,
    owner: Owner,
) -> Any:
    """Cast a floating-point input to a float8 DTensor; return anything else unchanged.

    ``owner`` is the ``float8_weight`` of the first layer that takes the input.
    """
    castable = isinstance(x, torch.Tensor) and x.dtype.is_floating_point
    if layout is None or not castable or isinstance(local_tensor(x), Float8Tensor):
        return x
    x = autocast(x)
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, (layout,), run_check=False)
    sharded = [sharded_dim(placement, x.ndim) for placement in x.placements]
    in_parts = cast.granularity.blocks is not None and x.ndim - 1 in sharded
    if in_parts or has_pieces(tuple(x.placements)):
        warn_once(
            "prepared in parts",
            f"{owner.fqn}: PrepareFloat8ModuleInput leaves its input in high precision, because "
            f"it has one scale per {cast.granularity.name} and is placed as {list(x.placements)}; "
            "shard the sequence or the batch instead (Shard(0), Shard(1))",
        )
        return x
    return _CastInput.apply(reduced(x), cast, power_of_2, history, torch.is_grad_enabled(), owner)


class _CastInput(torch.autograd.Function):
    """Cast whose gradient passes unchanged; ``record``: it belongs to a training step."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        cast: CastSpec,
        power_of_2: bool,
        history: AmaxHistory | None,
        record: bool,
        owner: Owner,
    ) -> torch.Tensor:
        if history is not None:
            copy = CopySpec(cast)
            quantized = history.copies_of(input, (copy,), record)[copy]
        else:
            quantized = quantize_over(input, cast, power_of_2)
        if is_observed():
            return observe_prepared_cast(owner, input, quantized)
        return as_float8_of(input, quantized)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return grad, None, None, None, None, None
