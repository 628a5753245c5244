"""Casts to float8, differentiable and DTensor-aware."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from fp8_dist import scaling
from fp8_dist.config import CastConfig, ScalingGranularity, ScalingType
from fp8_dist.kernels.custom_op import composite_op
from fp8_dist.mesh import Layout, local_tensor, reduced
from fp8_dist.operand.history import AmaxHistory
from fp8_dist.operand.in_graph import context, handles_of, history_of, takes_operators
from fp8_dist.operand.prepare import as_float8
from fp8_dist.scaling import Scheme, scheme_named
from fp8_dist.tensor import Float8Tensor
from fp8_dist.text import kind_of, wrong_type
from fp8_dist.torch_internals import (
    has_functorch_transforms,
    may_be_transformed,
    recorded_as_operators_are,
)


@recorded_as_operators_are
def cast_to_float8(
    tensor: torch.Tensor,
    cast_config: CastConfig,
    *,
    dim: int | None = None,
    round_scales_to_power_of_2: bool = False,
) -> torch.Tensor:
    """Cast a tensor to float8 with the scale of the global tensor.

    Args:
        tensor: floating point, any shape. A DTensor may have any placements. Its amax is reduced
            over exactly the axes that shard it. Partial axes are all-reduced first.
        cast_config: ``target_dtype=None`` means e4m3. ``DISABLED`` returns ``tensor`` itself.
        dim: the reduced dim of an axiswise cast (one scale for each index of the other dims);
            ``None`` for a tensorwise or blockwise one.
        round_scales_to_power_of_2: round the quantization multiplier down to a power of two. Block
            scales are always powers of two.

    Returns:
        Float8Tensor of the input's shape, or DTensor(Float8Tensor) with the placements of the input
        (Replicate instead of Partial). Its scale is fp32, 0-dim or of size 1 along ``dim``, and
        follows the formula of :mod:`fp8_dist.kernels.scale`. Blocks have exponents instead.
        ``redistribute`` moves 1 byte per element; scales along the last dim move with their rows. A
        tensor with scales along other dims, with square blocks, or with blocks that shards cut
        can't be redistributed. The gradient passes through unchanged. On a rank outside the
        DTensor's mesh the local tensor is empty.

    Collectives: an all-reduce over the axes that shard the values of one scale, if there are any.
    It has 4 bytes per scale, or 1 byte per block if shards cut blocks. Blocks that no shard cuts
    need none. Axes that no process group spans are reduced one after the other (see
    :mod:`fp8_dist.mesh.amax`). Partial axes are all-reduced in high precision.

    Raises:
        TypeError: ``tensor`` is not a tensor, not floating point, or float8 already.
        ValueError: ``dim`` does not fit the granularity or the tensor, or the scale is DELAYED,
            which needs the history of a Float8Linear.
        NotImplementedError: a transform of ``torch.func`` is active, the tensor has a tangent of
            forward-mode differentiation, torch.jit.trace runs, or ranks hold several pieces of a
            DTensor (``_StridedShard``), some of which begin inside a block.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"cast_to_float8: expected a tensor, got {kind_of(tensor)}")
    if not isinstance(cast_config, CastConfig):
        wrong = wrong_type(cast_config, [CastConfig])
        raise TypeError(f"cast_to_float8: cast_config must be a CastConfig, got {wrong}")
    if isinstance(local_tensor(tensor), Float8Tensor):
        raise TypeError("cast_to_float8: the tensor is float8 already; use it as it is")
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"cast_to_float8: expected a floating-point tensor, got {tensor.dtype}")
    if not cast_config.enabled:
        return tensor
    check_layout("cast_to_float8", tensor)
    check_transforms("cast_to_float8", tensor)
    scheme = cast_config.scheme("input", round_scales_to_power_of_2)
    _check_dim(tensor, cast_config, scheme, dim)
    if cast_config.scaling_type is ScalingType.DELAYED:
        raise ValueError(
            "cast_to_float8: a DELAYED scale comes from the history that a Float8Linear keeps; use "
            "ScalingType.DYNAMIC"
        )
    if dim is not None:
        scheme = scaling.covering((dim % tensor.ndim,), scheme, tensor.ndim)
    return cast_with_gradient(reduced(tensor), scheme)


def cast_with_gradient(
    tensor: torch.Tensor, scheme: Scheme, history: AmaxHistory | None = None
) -> torch.Tensor:
    """Cast a tensor, or a DTensor without Partial placements; the gradient passes unchanged.

    ``history``: the amax history of a DELAYED scale.
    """
    if torch.compiler.is_compiling() and takes_operators():
        handles = [] if history is None else handles_of(history)
        low: torch.Tensor = _cast_in_graph(tensor, handles, scheme.key, context())
        return low
    return _CastToFloat8.apply(tensor, scheme, history)


@composite_op("to_float8(Tensor x, Tensor[] handles, str scheme, str context) -> Tensor")
def _cast_in_graph(
    x: torch.Tensor, handles: Sequence[torch.Tensor], scheme: str, context: str
) -> torch.Tensor:
    """Operator of :func:`cast_with_gradient`.

    ``context``: not used here; a part of the key in torch's caches.
    """
    history = history_of(handles) if handles else None
    return _CastToFloat8.apply(x, scheme_named(scheme), history)


def check_layout(name: str, tensor: torch.Tensor) -> None:
    """Raise NotImplementedError for a nested or sparse tensor, which has no float8 cast."""
    if tensor.is_nested:
        raise NotImplementedError(
            f"{name}: the input is a nested tensor, which has no float8 cast; pass its values, "
            "which are one tensor, and nest the output again: "
            "torch.nested.nested_tensor_from_jagged(layer(x.values()), x.offsets()). One with the "
            "strided layout must be made with layout=torch.jagged before"
        )
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"{name}: the input has the layout {tensor.layout}, which has no float8 cast; pass its "
            "to_dense()"
        )


def check_transforms(name: str, *tensors: torch.Tensor | None) -> None:
    """Raise NotImplementedError in torch.func's transforms, for tangents, or in jit.trace."""
    if torch.compiler.is_compiling() or not may_be_transformed():
        return
    if torch.jit.is_tracing():
        raise NotImplementedError(
            f"{name}: torch.jit.trace would record the kernels of one call as constants; use "
            "torch.export (torch.onnx.export with dynamo=True), or torch.compile"
        )
    has_tangents = any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )
    if has_tangents or has_functorch_transforms():
        raise NotImplementedError(
            f"{name}: float8 has no forward-mode derivatives, and can't run under the transforms "
            "of torch.func (vmap, grad, jvp, jacrev, hessian); leave the layer unconverted, or use "
            "reverse-mode torch.autograd"
        )


def _check_dim(
    tensor: torch.Tensor, cast_config: CastConfig, scheme: Scheme, dim: int | None
) -> None:
    if cast_config.scaling_granularity is not ScalingGranularity.AXISWISE:
        if dim is not None:
            raise ValueError(
                f"cast_to_float8: dim={dim} is the reduced dim of an axiswise cast, but the "
                f"granularity is {cast_config.scaling_granularity}; drop dim"
            )
        levels = [level for level in scheme.levels if not level.is_scalar]
        needed = max([1 + ((level.rows or 1) > 1) for level in levels], default=0)
        if tensor.ndim < needed:
            raise ValueError(
                f"cast_to_float8: one scale per {scheme.covers} needs a tensor of {needed} dims or "
                f"more, got {tensor.ndim}"
            )
    elif dim is None:
        raise ValueError(
            "cast_to_float8: an AXISWISE cast needs dim, the reduced dim (-1: a scale per row)"
        )
    elif not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"cast_to_float8: dim={dim}, but the tensor has {tensor.ndim} dims")


class _CastToFloat8(torch.autograd.Function):
    """Cast whose gradient passes unchanged."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, scheme: Scheme, history: AmaxHistory | None
    ) -> torch.Tensor:
        layout = Layout.of(tensor)
        if layout is not None and layout.mesh.get_coordinate() is None:
            # As with DTensor's operators, a rank outside the mesh has an empty local tensor.
            local = local_tensor(tensor)
            one = local.new_ones((), dtype=torch.float32)
            return layout.wrap(Float8Tensor(local.to(scheme.dtype), one, tensor.dtype))
        return as_float8(tensor, scheme, history)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return grad, None, None
