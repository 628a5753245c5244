"""What operators do to a local ``Float8Tensor``: the table behind its ``__torch_dispatch__``.

One tensorwise scale belongs to every element, so an operator that only moves elements runs on the
bytes and keeps the scale. Bytes are moved as ``uint8`` where a backend lacks float8 kernels: all
collectives (gloo, old NCCL and MPI refuse float8), ``cat`` and padding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from fp8_dist.dtypes import is_float8
from fp8_dist.tensor import FLOAT8_OPS, Float8Tensor, dequantized

aten = torch.ops.aten
funcol = torch.ops._c10d_functional

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def implements(*overloads: Any) -> Callable[[Handler], Handler]:
    """Register a handler for the given operator overloads."""

    def register(handler: Handler) -> Handler:
        for overload in overloads:
            assert overload not in FLOAT8_OPS, f"{overload} has two handlers"
            FLOAT8_OPS[overload] = handler
        return handler

    return register


def as_bytes(qdata: torch.Tensor) -> torch.Tensor:
    """A uint8 view of float8 data."""
    return qdata.view(torch.uint8)


@implements(
    aten.alias.default,
    aten.as_strided.default,
    aten.clone.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
)
def _move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    x = args[0]
    return x.rewrap(qdata=func(x.qdata, *args[1:], **kwargs))


@implements(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.chunk.default)
def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Float8Tensor]:
    x = args[0]
    return [x.rewrap(qdata=q) for q in func(x.qdata, *args[1:], **kwargs)]


@implements(aten.cat.default)
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    tensors, rest = args[0], args[1:]
    first = tensors[0]
    for x in tensors:
        if not isinstance(x, Float8Tensor):
            raise TypeError(
                f"torch.cat of a Float8Tensor and a {type(x).__name__}: dequantize() the first "
                "or cast_to_float8 the second"
            )
        if x.qdata.dtype != first.qdata.dtype:
            raise ValueError(
                f"torch.cat of float8 tensors of {first.qdata.dtype} and {x.qdata.dtype}"
            )
        # Chunks of one tensor share its scale object: no comparison of values, hence no sync.
        if x.scale is not first.scale and not torch.equal(x.scale, first.scale):
            raise ValueError(
                "torch.cat of float8 tensors that were cast with different scales; dequantize() "
                "them, or cast them together"
            )
    out = func([as_bytes(x.qdata) for x in tensors], *rest, **kwargs)
    return first.rewrap(qdata=out.view(first.qdata.dtype))


@implements(aten.constant_pad_nd.default)
def _pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    x, pad = args[:2]
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    if value != 0:
        raise NotImplementedError(
            f"padding a Float8Tensor with {value}: only 0 has the same float8 code under every "
            "scale; call .dequantize() first"
        )
    return x.rewrap(qdata=func(as_bytes(x.qdata), pad, 0).view(x.qdata.dtype))


@implements(aten._to_copy.default)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    x = args[0]
    dtype = kwargs.pop("dtype", None) or x.orig_dtype
    if not dtype.is_floating_point or is_float8(dtype):
        raise NotImplementedError(
            f"a Float8Tensor cannot become {dtype}; call .dequantize() and convert the result"
        )
    scale_kwargs = {k: v for k, v in kwargs.items() if k in ("device", "non_blocking")}
    return x.rewrap(
        qdata=func(x.qdata, **kwargs),
        scale=func(x.scale, **scale_kwargs),
        orig_dtype=dtype,
    )


@implements(aten.copy_.default)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    dst, src = args[:2]
    if not isinstance(dst, Float8Tensor) or not isinstance(src, Float8Tensor):
        raise NotImplementedError(
            f"{func} between a {type(dst).__name__} and a {type(src).__name__}: dequantize() or "
            "cast_to_float8 first, so that both are of one kind"
        )
    if dst.qdata.dtype != src.qdata.dtype:
        raise ValueError(f"copy_ from {src.qdata.dtype} to {dst.qdata.dtype} data")
    func(dst.qdata, src.qdata, *args[2:], **kwargs)
    func(dst.scale, src.scale, *args[2:], **kwargs)
    return dst


@implements(aten.zeros_like.default, aten.empty_like.default)
def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    # High precision: what is made like a float8 tensor holds its gradients.
    x = args[0]
    return func(x.qdata, *args[1:], **({"dtype": x.orig_dtype} | _given(kwargs)))


@implements(aten.new_zeros.default, aten.new_empty.default, aten.new_empty_strided.default)
def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    # float8, unless another dtype is asked for: a shard that DTensor adds, empty or to be filled.
    x = args[0]
    if kwargs.get("dtype") is not None:
        return func(x.qdata, *args[1:], **kwargs)
    return x.rewrap(qdata=func(x.qdata, *args[1:], **kwargs))


@implements(aten.dequantize.self)
def _dequantize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return dequantized(args[0])


@implements(aten.is_same_size.default)
def _is_same_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return args[0].shape == args[1].shape


@implements(
    funcol.all_gather_into_tensor.default,
    funcol.all_to_all_single.default,
    funcol.broadcast.default,
    funcol.wait_tensor.default,
    torch.ops._dtensor.shard_dim_alltoall.default,
)
def _collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    # Every rank cast with the scale of the global tensor: the bytes are all there is to send.
    x = args[0]
    out = func(as_bytes(x.qdata.contiguous()), *args[1:], **kwargs)
    return x.rewrap(qdata=out.view(x.qdata.dtype))


# torch >= 2.13 wraps the result of a collective by an operator, older ones by a plain call.
if hasattr(funcol, "_wrap_tensor_autograd"):

    @implements(funcol._wrap_tensor_autograd.default)
    def _in_flight(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        return AsyncCollectiveTensor(args[0])


def _given(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if value is not None}
