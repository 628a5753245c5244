"""``Float8Tensor``: float8 data, its scales, and the high-precision dtype that it was cast from.

DTensor is outermost: a distributed float8 tensor is ``DTensor(Float8Tensor(qdata, scale))``. A
scale covers values of the *global* tensor. A scale of the whole tensor is the same on every rank,
so a float8 gather moves only the data. Scales of rows move with their rows.
"""

from collections.abc import Callable
from typing import Any

import torch

from fp8_dist.device import is_float8, short_name
from fp8_dist.scaling import Dense, Quantized, Scales, Scheme, Start, covering, scheme_named
from fp8_dist.tensor.subclass import TensorSubclass
from fp8_dist.torch_internals import STAND_INS, is_mutable, make_wrapper

# aten / collective overload -> handler(func, args, kwargs); filled by fp8_dist.tensor.ops.
FLOAT8_OPS: dict[Any, Callable[..., Any]] = {}


class Float8Tensor(TensorSubclass):
    """A tensor that is stored in float8: ``dequantize()`` is ``qdata`` times its scales.

    Attributes:
        qdata: the float8 data, of this tensor's shape and strides.
        scale: the dequantization scale; the first of ``scales`` where a scheme has several levels.
            For a :class:`fp8_dist.scaling.Dense` scheme it is fp32: 0-dim for the whole (global)
            tensor, or of size 1 along the dims that one scale covers, such as ``[..., 1]``. Block
            scales are powers of two: uint8, ``[..., C]`` or ``[R, C]``, the bytes of e8m0 exponents
            (``scale.view(torch.float8_e8m0fnu)``).
        scales: the scales of all levels of the scheme.
        orig_dtype: the high-precision dtype it was cast from, which is also its ``dtype``.
        scheme: the scaling scheme. (The tensor holds its key, because the attributes of a tensor in
            a graph must be plain data.)
        start: see :class:`fp8_dist.scaling.Quantized`.
        splits_blocks: see :class:`fp8_dist.scaling.Quantized`.
        origin: the tensor before the cast, for observers (``fp8_dist.debug.float8_stats``). Tensors
            made from this one keep it in eager code. None without an observer.
        local_amax: the amax of the local tensor that was cast, fp32, 0-dim, for an amax history;
            None if it was not cast with a history. Tensors made from this one keep it.

    Args:
        scale: the scale, or a sequence of the scales of all levels.
        scheme: a scheme or its key. ``None`` means the dense scheme that fits the shape of the
            scale.

    The other arguments are the attributes. The constructor raises TypeError for other dtypes, and
    ValueError for scales that do not fit. Operators that move or multiply float8 data are supported
    (``fp8_dist.tensor.ops``). All others raise NotImplementedError.
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    orig_dtype: torch.dtype
    key: str
    start: Start
    splits_blocks: bool
    origin: Any
    local_amax: torch.Tensor | None = None

    @staticmethod
    def __new__(
        cls,
        qdata: torch.Tensor,
        scale: torch.Tensor | Scales,
        orig_dtype: torch.dtype,
        scheme: Scheme | str | None = None,
        origin: Any = None,
        start: Start = (0, 0),
        splits_blocks: bool = False,
        local_amax: torch.Tensor | None = None,
    ) -> "Float8Tensor":
        scales = (scale,) if isinstance(scale, torch.Tensor) else tuple(scale)
        if not is_float8(qdata.dtype):
            raise TypeError(f"Float8Tensor: qdata must have a float8 dtype, got {qdata.dtype}")
        if scheme is None:
            scheme = _scheme_from(qdata, scales[0])
        elif isinstance(scheme, str):
            scheme = scheme_named(scheme)
        if not orig_dtype.is_floating_point or len(scales) != len(scheme.levels):
            raise _wrong_dtypes(scheme, scales, orig_dtype)
        for level, scale in zip(scheme.levels, scales, strict=True):
            if scale.dtype is not level.scale:
                raise _wrong_dtypes(scheme, scales, orig_dtype)
            if list(scale.shape) != level.shape(qdata.shape, start):
                raise _wrong_shapes(scheme, scales, qdata, start)
        self = make_wrapper(cls, qdata, orig_dtype)
        self.qdata, self.orig_dtype, self.origin = qdata, orig_dtype, origin
        self.key, self.start, self.splits_blocks = scheme.key, start, splits_blocks
        self.local_amax = local_amax
        self.set_scales(scales)
        return self

    def set_scales(self, scales: Scales) -> None:
        """Replace the scales of all levels with scales of the same shapes."""
        self._levels = len(scales)
        for name, scale in zip(_SCALES, scales, strict=False):
            setattr(self, name, scale)

    @property
    def scales(self) -> Scales:
        """The scales of all levels of the scheme, the coarsest first."""
        return scales_of(self)

    @property
    def scheme(self) -> Scheme:
        """The scaling scheme."""
        return scheme_named(self.key)

    @staticmethod
    def of(
        quantized: Quantized, orig_dtype: torch.dtype, local_amax: torch.Tensor | None = None
    ) -> "Float8Tensor":
        """Wrap a local float8 tensor that was cast from ``orig_dtype``."""
        qdata, scales, scheme, *position = quantized
        rest: Any = scheme.key, None, *position, local_amax
        return Float8Tensor(qdata, scales, orig_dtype, *rest)

    @property
    def quantized(self) -> Quantized:
        """The data with its scales, as a :class:`fp8_dist.scaling.Quantized`."""
        return quantized_as(self, self.scheme)

    def rewrap(self, **changes: Any) -> "Float8Tensor":
        """Return a new Float8Tensor with the arguments of this one, except for those given."""
        arguments = {
            "qdata": self.qdata,
            "scale": scales_of(self),
            "orig_dtype": self.orig_dtype,
            "scheme": self.key,
            "origin": self.origin,
            "start": self.start,
            "splits_blocks": self.splits_blocks,
            "local_amax": self.local_amax,
        }
        return Float8Tensor(**(arguments | changes))

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        """Multiply ``qdata`` by its scales in fp32, and round once to ``orig_dtype``.

        This is differentiable: the gradient passes through unchanged, as through the cast. On a
        DTensor(Float8Tensor) torch's own method is called, which has no gradient; use
        ``to_local().dequantize()`` there.
        """
        return _Dequantize.apply(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        shown = ", ".join([_shown(scale) for scale in self.scales])
        return (
            f"Float8Tensor(shape={tuple(self.shape)}, qdata={short_name(self.qdata.dtype)}, "
            f"scale={shown}, orig_dtype={short_name(self.orig_dtype)}, device={self.device})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        amax = [] if self.local_amax is None else ["local_amax"]
        return ["qdata", *_SCALES[: self._levels], *amax], {
            "orig_dtype": self.orig_dtype,
            "scheme": self.key,
            "start": self.start,
            "splits_blocks": self.splits_blocks,
        }

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], static: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> "Float8Tensor":
        scales = tuple([inner[name] for name in _SCALES if name in inner])
        return Float8Tensor(inner["qdata"], scales, **static, local_amax=inner.get("local_amax"))

    def readable(self, reader: str) -> torch.Tensor:
        raise NotImplementedError(
            f"{reader} is not supported on a Float8Tensor; call .dequantize() and use the "
            "high-precision tensor"
        )

    def data_ptr(self) -> int:
        """Return 0, because only the inner tensors have addresses."""
        return 0

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Other types (DTensor, a collective's result in flight) handle the operator first.
        for kind in types:
            if kind not in _OWN_TYPES and not issubclass(kind, STAND_INS):
                return NotImplemented
        if (handler := FLOAT8_OPS.get(func)) is None:
            # Under inference_mode, composite operators arrive here without being decomposed.
            result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
            remedy = "call .dequantize() and use the high-precision tensor"
            if is_mutable(func):
                remedy += ". (To write to a weight that FSDP2 has gathered, reshard() it first)"
            raise NotImplementedError(f"{func} is not supported on a Float8Tensor; {remedy}")
        return handler(func, args, kwargs or {})


def _wrong_dtypes(scheme: Scheme, scales: Scales, orig_dtype: torch.dtype) -> TypeError:
    needed = [level.scale for level in scheme.levels]
    dtypes = [scale.dtype for scale in scales]
    return TypeError(
        f"Float8Tensor: scales must be {needed} for one scale per {scheme.covers}, and "
        f"orig_dtype floating point, got {dtypes} and {orig_dtype}"
    )


def _wrong_shapes(scheme: Scheme, scales: Scales, qdata: torch.Tensor, start: Start) -> ValueError:
    shown = [tuple(scale.shape) for scale in scales]
    return ValueError(
        f"Float8Tensor: scales of the shapes {shown} do not cover qdata of shape "
        f"{tuple(qdata.shape)} with one scale per {scheme.covers}; they must be "
        f"{scheme.scale_shapes(qdata.shape, start)}"
    )


_OWN_TYPES = (torch.Tensor, torch.nn.Parameter, Float8Tensor)

# Names of the scales as attributes, by level.
_SCALES = ("scale", *(f"scale_{i}" for i in range(1, 8)))


def quantized_as(x: Float8Tensor, scheme: Scheme) -> Quantized:
    """``x.quantized``, with its scheme as an argument because dynamo can't look it up."""
    return Quantized(x.qdata, scales_of(x), scheme, x.start, x.splits_blocks)


def scales_of(x: Float8Tensor) -> Scales:
    """``x.scales``, as a function because dynamo does not trace the property."""
    scales: Scales = (x.scale,)
    for name in _SCALES[1 : x._levels]:
        scales += (getattr(x, name),)
    return scales


def _scheme_from(qdata: torch.Tensor, scale: torch.Tensor) -> Scheme:
    """The dense scheme that fits the shape of a scale."""
    if scale.ndim == 0:
        return Dense(qdata.dtype)
    if scale.shape == (*qdata.shape[:-1], 1):
        return Dense(qdata.dtype, "row")
    covered = tuple(dim for dim, n in enumerate(scale.shape) if n == 1)
    return covering(covered, Dense(qdata.dtype), qdata.ndim)


def _shown(scale: torch.Tensor) -> str:
    if scale.ndim:
        kind = {torch.float32: "fp32", torch.uint8: "e8m0"}.get(scale.dtype, str(scale.dtype))
        return f"{kind.removeprefix('torch.')}{list(scale.shape)}"
    return f"{scale.item():.6g}" if type(scale) is torch.Tensor and not scale.is_meta else "?"


def dequantize_detached(x: Float8Tensor) -> torch.Tensor:
    """``dequantize()`` outside of autograd."""
    return x.scheme.dequantize(x.qdata, x.scales, x.start).to(x.orig_dtype)


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Float8Tensor) -> torch.Tensor:
        return dequantize_detached(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


torch.serialization.add_safe_globals([Float8Tensor])
