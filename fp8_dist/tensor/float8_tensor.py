"""``Float8Tensor``: float8 bytes, their scale, and the dtype they stand for.

DTensor is outermost: a distributed float8 tensor is ``DTensor(Float8Tensor(qdata, scale))``. A
scale covers the *global* tensor, or a whole row or column of it. A tensorwise scale is the same on
every rank, so a float8 gather moves only the bytes. Rowwise scales travel with their rows.
"""

from collections.abc import Callable
from typing import Any

import torch

from fp8_dist.dtypes import is_float8, short_name
from fp8_dist.granularity import ROW, TENSOR, Granularity, covering, granularity_named
from fp8_dist.kernels import powers_of_2, scaled_by
from fp8_dist.torch_internals import (
    STAND_INS,
    disabled_torch_function,
    is_mutable,
    make_wrapper_subclass,
    stable_hash,
)

# aten / collective overload -> handler(func, args, kwargs); filled by fp8_dist.tensor.ops.
FLOAT8_OPS: dict[Any, Callable[..., Any]] = {}


class Float8Tensor(torch.Tensor):
    """A tensor that is stored in float8: ``dequantize()`` is ``qdata * scale``.

    Attributes:
        qdata: the float8 bytes, of this tensor's shape and strides.
        scale: fp32 dequantization scale. It is 0-dim for the whole (global) tensor, or has as many
            dims as ``qdata`` and size 1 along those that one scale covers, such as ``[..., 1]``.
            Several scales per row are ``[..., C]``, as :meth:`Granularity.to_rows` returns them.
            Block scales are powers of two: uint8, ``[..., C]`` or ``[R, C]``, the bytes of e8m0
            exponents (``scale.view(torch.float8_e8m0fnu)``).
        orig_dtype: the high-precision dtype it was cast from, which is also its ``dtype``.
        granularity: name of the granularity; :func:`granularity_of` returns the object. It is a
            name because a tensor in a graph may only have attributes of plain data.
        cast_number: a 0-dim int64 CPU tensor that distinguishes this cast from others on this rank,
            for recorders such as ``fp8_dist.debug.float8_stats``. Tensors made from this one keep
            it. None if nothing records.

    The constructor takes these attributes. It raises TypeError for other dtypes, and ValueError for
    a scale that does not fit. ``granularity=None`` means a scale per row if the shape allows it,
    otherwise a scale that covers the dims of size 1 in ``scale``. Operators that move or multiply
    float8 data support it (``fp8_dist.tensor.ops``); any other raises NotImplementedError.
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    orig_dtype: torch.dtype
    granularity: str
    cast_number: torch.Tensor | None

    # The one declaration of the fields: flatten, unflatten and rewrap follow from it.
    _TENSOR_FIELDS = ("qdata", "scale", "cast_number")  # the last may be None
    _STATIC_FIELDS = ("orig_dtype", "granularity")
    __slots__ = _TENSOR_FIELDS + _STATIC_FIELDS

    @staticmethod
    def __new__(
        cls,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        orig_dtype: torch.dtype,
        granularity: str | None = None,
        cast_number: torch.Tensor | None = None,
    ) -> "Float8Tensor":
        if not is_float8(qdata.dtype):
            raise TypeError(f"Float8Tensor: qdata must have a float8 dtype, got {qdata.dtype}")
        blocks = granularity is not None and granularity_named(granularity).blocks is not None
        wanted = torch.uint8 if blocks else torch.float32
        if scale.dtype is not wanted or not orig_dtype.is_floating_point:
            kind = "uint8, the exponents of blocks," if blocks else "fp32"
            raise TypeError(
                f"Float8Tensor: scale must be {kind} and orig_dtype floating point, got "
                f"{scale.dtype} and {orig_dtype}"
            )
        if granularity is None or (scale.ndim == 0 and not blocks):
            granularity = _granularity_from(qdata, scale).name
        if (scale.ndim or blocks) and not _fits(qdata, scale, granularity_named(granularity)):
            raise ValueError(
                f"Float8Tensor: a scale of shape {tuple(scale.shape)} does not cover qdata of "
                f"shape {tuple(qdata.shape)}; it must be 0-dim, or of size 1 along what it covers"
            )
        self = make_wrapper_subclass(
            cls,
            qdata.size(),
            strides=qdata.stride(),
            storage_offset=qdata.storage_offset(),
            dtype=orig_dtype,
            layout=qdata.layout,
            device=qdata.device,
        )
        self.qdata = qdata
        self.scale = scale
        self.orig_dtype = orig_dtype
        self.granularity = granularity
        self.cast_number = cast_number
        return self

    def rewrap(self, **changes: Any) -> "Float8Tensor":
        """Return a new Float8Tensor with the fields of this one, except for those given."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return Float8Tensor(**(fields | changes))

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        """``qdata * scale`` in ``orig_dtype`` (computed in fp32, rounded once).

        This is differentiable: the gradient passes unchanged, as it does through the cast. On a
        DTensor(Float8Tensor) the method is torch's, which has no gradient. Use
        ``to_local().dequantize()`` there.
        """
        return _Dequantize.apply(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        scale = "?"
        if self.scale.ndim:
            kind = "fp32" if self.scale.dtype is torch.float32 else "e8m0"
            scale = f"{kind}{list(self.scale.shape)}"
        elif type(self.scale) is torch.Tensor and not self.scale.is_meta:
            scale = f"{self.scale.item():.6g}"
        return (
            f"Float8Tensor(shape={tuple(self.shape)}, qdata={short_name(self.qdata.dtype)}, "
            f"scale={scale}, orig_dtype={short_name(self.orig_dtype)}, device={self.device})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        tensors = [name for name in self._TENSOR_FIELDS if getattr(self, name) is not None]
        return tensors, {name: getattr(self, name) for name in self._STATIC_FIELDS}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], static: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> "Float8Tensor":
        return Float8Tensor(**(inner | static))

    _stable_hash_for_caching = stable_hash
    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Other types (DTensor, a collective's result in flight) handle the operator first.
        own = (torch.Tensor, torch.nn.Parameter, Float8Tensor)
        if not all(t in own or issubclass(t, STAND_INS) for t in types):
            return NotImplemented
        handler = FLOAT8_OPS.get(func)
        if handler is None:
            # Under inference_mode composite operators are not decomposed before.
            result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
            remedy = "call .dequantize() and use the high-precision tensor"
            if is_mutable(func):
                remedy += ". (To write to a weight that FSDP2 has gathered, reshard() it first)"
            raise NotImplementedError(f"{func} is not supported on a Float8Tensor; {remedy}")
        return handler(func, args, kwargs or {})


def granularity_of(x: Float8Tensor) -> Granularity:
    """Return the granularity of the scales of a tensor."""
    return granularity_named(x.granularity)


def _granularity_from(qdata: torch.Tensor, scale: torch.Tensor) -> Granularity:
    """Granularity of a scale, from its shape."""
    if scale.ndim == 0:
        return TENSOR
    if scale.shape == (*qdata.shape[:-1], 1):
        return ROW
    return covering(tuple(dim for dim, n in enumerate(scale.shape) if n == 1), qdata.ndim)


def _fits(qdata: torch.Tensor, scale: torch.Tensor, granularity: Granularity) -> bool:
    if granularity.blocks is not None:
        return [*scale.shape] == granularity.scale_shape(qdata.shape)
    if granularity.is_grouped:
        return scale.shape[:-1] == qdata.shape[:-1]
    return scale.ndim == qdata.ndim and all(
        n in (1, size) for n, size in zip(scale.shape, qdata.shape, strict=True)
    )


def dequantized(x: Float8Tensor) -> torch.Tensor:
    """``dequantize()`` outside of autograd."""
    granularity = granularity_of(x)
    if granularity.blocks is not None:
        wide = scaled_by(x.qdata.to(torch.float32), powers_of_2(x.scale), granularity.blocks)
        return wide.to(x.orig_dtype)
    values = granularity.grouped(x.qdata.to(torch.float32)) * granularity.from_rows(x.scale)
    return values.to(x.orig_dtype).view(x.shape)


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Float8Tensor) -> torch.Tensor:
        return dequantized(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


torch.serialization.add_safe_globals([Float8Tensor])
