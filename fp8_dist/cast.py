"""Casts to float8, differentiable and DTensor-aware."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fp8_dist.config import CastConfig, ScalingGranularity
from fp8_dist.scaling import amax, quantize, scaling_from_amax
from fp8_dist.sharding import Layout, local_tensor, reduce_amax, reduced, sharded_axes
from fp8_dist.tensor import Float8Tensor


def cast_to_float8(
    tensor: torch.Tensor,
    cast_config: CastConfig,
    *,
    dim: int | None = None,
    round_scales_to_power_of_2: bool = False,
) -> torch.Tensor:
    """Cast a tensor to float8 with the scale of the whole, global tensor.

    Args:
        tensor: floating point, any shape. A DTensor may have any placements: amax is reduced over
            exactly the axes on which it is sharded; Partial ones are reduced first.
        cast_config: ``target_dtype=None`` means e4m3. ``DISABLED`` returns ``tensor`` itself.
        dim: the reduced dim of an axiswise cast; ``None`` for a tensorwise one.
        round_scales_to_power_of_2: round the quantization multiplier down to a power of two.

    Returns:
        Float8Tensor of the input's shape (qdata in the float8 dtype, a 0-dim fp32 scale; the
        formula is in :mod:`fp8_dist.scaling`), or DTensor(Float8Tensor) with the placements of
        the input (Partial became Replicate). Its ``redistribute`` moves 1 byte per element. The
        gradient passes unchanged.

    Collectives: at most one all-reduce of 4 bytes (and those of Partial axes, high precision).

    Raises:
        TypeError: ``tensor`` is no tensor, not floating point, or float8 already.
        ValueError: ``dim`` does not fit the granularity.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"cast_to_float8: expected a tensor, got a {type(tensor).__name__}")
    if not isinstance(cast_config, CastConfig):
        raise TypeError(f"cast_to_float8: cast_config must be a CastConfig, got {cast_config!r}")
    if isinstance(tensor, Float8Tensor) or isinstance(local_tensor(tensor), Float8Tensor):
        raise TypeError("cast_to_float8: the tensor is float8 already")
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"cast_to_float8: expected a floating-point tensor, got {tensor.dtype}")
    if dim is not None and cast_config.scaling_granularity is ScalingGranularity.TENSORWISE:
        raise ValueError(
            f"cast_to_float8: dim={dim} is the reduced dim of an axiswise cast, but the "
            "granularity is TENSORWISE; drop dim"
        )
    if not cast_config.enabled:
        return tensor
    dtype = cast_config.dtype_for("input")
    return _CastToFloat8.apply(reduced(tensor), dtype, round_scales_to_power_of_2)


def scaling_of(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    round_scales_to_power_of_2: bool,
    axes: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantization multiplier and the scale of a tensor for a float8 dtype.

    Args:
        tensor: a tensor or DTensor without Partial placements.
        axes: mesh axes to reduce amax over; ``None`` means those on which it is sharded.

    Returns:
        Two 0-dim fp32 tensors. At most one all-reduce of 4 bytes.
    """
    value = amax(local_tensor(tensor))
    if isinstance(tensor, DTensor):
        over = sharded_axes(tensor.placements) if axes is None else axes
        same = tuple(i for i, p in enumerate(tensor.placements) if p.is_replicate())
        value = reduce_amax(value, tensor.device_mesh, over, same)
    return scaling_from_amax(value, dtype, round_scales_to_power_of_2)


def cast_local(
    local: torch.Tensor, dtype: torch.dtype, scaling: tuple[torch.Tensor, torch.Tensor]
) -> Float8Tensor:
    """A local tensor as float8, with a known (multiplier, scale)."""
    multiplier, scale = scaling
    return Float8Tensor(quantize(local, multiplier, dtype), scale, local.dtype)


def cast_with(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    round_scales_to_power_of_2: bool,
    axes: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """The cast itself, outside autograd; arguments and collectives as in :func:`scaling_of`."""
    scaling = scaling_of(tensor, dtype, round_scales_to_power_of_2, axes)
    cast = cast_local(local_tensor(tensor), dtype, scaling)
    layout = Layout.of(tensor)
    return cast if layout is None else layout.wrap(cast)


class _CastToFloat8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dtype: torch.dtype, round_scales_to_power_of_2: bool
    ) -> torch.Tensor:
        return cast_with(tensor, dtype, round_scales_to_power_of_2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return grad, None, None
