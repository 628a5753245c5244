"""Frozen parameters in float8: the data of a weight, and its scales.

A weight that is not trained needs no copy in high precision. ``freeze_to_float8`` replaces it by
two frozen parameters: a :class:`StoredFloat8` under the weight's name, and a :class:`StoredScales`
under ``NAME_scale_inv``, as in FP8 checkpoints. FSDP2 and tensor parallelism shard, gather, move
and offload them like other parameters, without converting them.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fp8_dist.kernels.e2m1 import E2M1_X2
from fp8_dist.scaling import Scheme
from fp8_dist.scaling.operators import unpack
from fp8_dist.text import kind_of
from fp8_dist.torch_internals import tree_leaves, tree_map_only
from fp8_dist.weight import wrapper
from fp8_dist.weight.wrapper import bytes_of

aten, c10d = torch.ops.aten, torch.ops.c10d

# Operators that run on bytes, because some backends do not support float8.
_ON_BYTES = {
    aten.cat.default,
    aten.constant_pad_nd.default,
    c10d.broadcast_.default,
    c10d.scatter_.default,
}
# Operators, besides views, that return a parameter of the same type.
_SAME = wrapper.MOVES | _ON_BYTES | {aten.new_empty.default}
# Sums with a weight: ``weight.data += update`` (PEFT's merges), and its adapters of parameters.
_IN_PLACE = {aten.add_.Tensor, aten.sub_.Tensor}
_SUMS = _IN_PLACE | {aten.add.Tensor, aten.baddbmm.default}


class Stored(wrapper.WrapperParameter):
    """Base class of stored parameters, which are moved without being converted.

    Attributes:
        weight: returns the ``Float8Weight`` that the data, or what it was made from, belongs to;
            None if it is not known, or freed. :meth:`like` passes it on.
        payload: the dtype of FSDP2's all-gather input; None means the dtype of ``plain``.
    """

    weight: Callable[[], Any]
    payload: ClassVar[torch.dtype | None] = None
    __slots__ = ("weight",)

    @classmethod
    def check_rebuilds(cls, plain: torch.Tensor) -> None:
        if not isinstance(plain, cls):
            raise NotImplementedError(
                f"a loader rebuilds a parameter that is stored in float8 ({cls.__name__}) from "
                f"data of {plain.dtype} alone, as accelerate's hooks do that offload weights; "
                "keep the model on one device, or call fp8_dist.unfreeze_from_float8(model) "
                "before it is offloaded"
            )

    def set_up(self) -> None:
        self.weight = lambda: None

    def readable(self, reader: str) -> torch.Tensor:
        if reader == "share_memory_()":
            return self.plain
        raise NotImplementedError(f"{reader} of a weight that is stored in float8; {_REMEDY}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, static = self.__tensor_flatten__()
        parts = type(self), bytes_of(self.plain), self.plain.dtype, static
        return wrapper.rebuilt, (*parts, self.requires_grad, self.__dict__)

    def assigned(self, value: torch.Tensor) -> Self:
        if not isinstance(value, type(self)):
            raise TypeError(
                "the .data of a weight that is stored in float8 can't become a "
                f"{type(value).__name__} of {value.dtype}; {_REMEDY}"
            )
        return value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        stored = next(arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, Stored))
        # Under inference_mode, composite operators arrive here without being decomposed.
        if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
            return result
        if func.is_view and func is not aten.detach.default and isinstance(stored, PackedFloat8):
            return stored.views(func, args[1:], kwargs)
        if not (func.is_view or func in _SAME):
            weight = stored.weight() if func in _SUMS and args[0] is stored else None
            if weight and (held := weight.held_in(stored, is_written=func in _IN_PLACE)):
                if func not in _IN_PLACE:
                    return func(held.read(), *args[1:], **kwargs)
                held.add(func, *args[1:], **kwargs)
                return stored
            raise NotImplementedError(f"{func} on a weight that is stored in float8; {_REMEDY}")
        dtype = kwargs.pop("dtype", None) if func is aten._to_copy.default else None
        if func is aten.copy_.default:
            _check_copy(args[0], args[1])
        if func is aten.cat.default and any(type(part) is not cls for part in args[0]):
            raise NotImplementedError(
                "a weight that is stored in float8 can't be joined with other tensors, as "
                "DistributedDataParallel does to broadcast parameters; call freeze_to_float8 on "
                "the module that it wraps, as the last step before that"
            )
        if func in (aten.new_zeros.default, aten.new_empty.default):
            args = stored, stored.inner_size(args[1]), *args[2:]
        as_bytes, inner_dtype = func in _ON_BYTES, stored.plain.dtype
        # Under inference_mode too, a view of a parameter is not an inference tensor.
        with torch.inference_mode(stored.plain.is_inference()), torch.no_grad():
            args_, kwargs_ = tree_map_only(
                Stored, lambda x: bytes_of(x.plain) if as_bytes else x.plain, (args, kwargs)
            )
            out = func(*args_, **kwargs_)
            if func is aten.copy_.default:
                return args[0]
            parts = tree_map_only(torch.Tensor, lambda x: x.view(inner_dtype), out)
        return tree_map_only(torch.Tensor, lambda x: stored.like(x, dtype), parts)

    def inner_size(self, size: Sequence[int]) -> torch.Size:
        """The size of the plain tensor inside a parameter of ``size``."""
        return torch.Size(size)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Size]:
        """Return the all-gather input for FSDP2: the stored shard, padded to FSDP2's size.

        Collectives: none.
        """
        size = self.inner_size(outer_size)
        rows, *_ = wrapper.padded_size(self.plain, size, mesh.size())
        data = wrapper.padded_shard(bytes_of(self.plain), rows)
        # A view of the payload's dtype, so that an audit can find it.
        return (bytes_of(data.view(self.payload or self.plain.dtype)),), size

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: torch.Size,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the unsharded parameter for FSDP2, on the storage of the gathered bytes."""
        if out is not None:
            return None  # FSDP2 refilled the same storage
        plain = wrapper.unpadded(all_gather_outputs[0], self.plain.dtype, metadata)
        return self.like(plain, param_dtype), ()


_REMEDY = (
    "read it with fp8_dist.dequantized(layer), or call fp8_dist.unfreeze_from_float8(model) first"
)


class StoredFloat8(Stored):
    """The float8 data of a frozen weight.

    Its dtype is the high-precision dtype of the weight before the cast and of the layer's
    gradients. If it were float8, adapters created with the weight's dtype would be float8, too.

    Attributes:
        plain: the data, in a float8 dtype.
        key: the key of the scaling scheme.
    """

    key: str
    static: ClassVar[tuple[str, ...]] = ("dtype", "key")
    __slots__ = ("key",)

    def like(self, plain: torch.Tensor, dtype: torch.dtype | None = None) -> Self:
        dtype = dtype if dtype is not None and dtype.is_floating_point else self.dtype
        return self._made(type(self), plain, dtype, *self.__tensor_flatten__()[1][1:])

    def _made(self, cls: Any, *arguments: Any) -> Any:
        made = cls(*arguments)
        made.weight = self.weight
        return made

    def unpacked(self, scheme: Scheme, after: torch.Tensor | None = None) -> torch.Tensor:
        """The data in float8; ``after``: as in :func:`fp8_dist.scaling.operators.unpack`."""
        return self.plain

    def with_data(self, data: torch.Tensor, scheme: Scheme) -> Self:
        """Return a tensor of this type with other data, in float8."""
        return self.like(data)


class PackedFloat8(StoredFloat8):
    """The float8 data of a frozen weight in packed form, two values in a byte.

    It is unpacked for each GEMM. FSDP2 gathers it packed.

    Attributes:
        plain: the packed data, uint8, ``[..., N, K / 2]`` for a weight ``[..., N, K]``.
        is_transposed: whether this is the transposed view ``[..., K, N]`` of such data.
    """

    is_transposed: bool
    payload: ClassVar[torch.dtype | None] = E2M1_X2
    static: ClassVar[tuple[str, ...]] = ("dtype", "key", "is_transposed")
    __slots__ = ("is_transposed",)

    @staticmethod
    def shape_of(plain: torch.Tensor, *static: Any) -> tuple[list[int], list[int]]:
        dim, size, strides = -2 if static[2] else -1, list(plain.shape), list(plain.stride())
        size[dim], strides = 2 * size[dim], [2 * stride for stride in strides]
        strides[dim] //= 2
        return size, strides

    def unpacked(self, scheme: Scheme, after: torch.Tensor | None = None) -> torch.Tensor:
        data = unpack(self.plain.mT if self.is_transposed else self.plain, scheme, after)
        return data.mT if self.is_transposed else data

    def in_float8(self, scheme: Scheme) -> StoredFloat8:
        """Return a tensor with the same values that is not packed."""
        return self._made(StoredFloat8, self.unpacked(scheme), self.dtype, self.key)

    def with_data(self, data: torch.Tensor, scheme: Scheme) -> Self:
        return self.like(scheme.pack(data).view(torch.uint8))

    def views(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the views of this parameter that an operator makes, given its other arguments."""
        outline = torch.empty_strided(self.shape, self.stride(), device="meta")
        return tree_map_only(torch.Tensor, self._part, func(outline, *args, **kwargs))

    def _part(self, view: torch.Tensor) -> Self:
        """Return a view of this parameter, given the same view of a tensor of its shape."""
        size, strides, first = list(view.shape), list(view.stride()), view.storage_offset()
        is_transposed = strides[-1] != 1
        dim = -2 if is_transposed else -1
        if strides[dim] != 1 or size[dim] % 2 or int(first) % 2:
            raise NotImplementedError(
                f"a view of {size} of a weight of {list(self.shape)} in four bits divides its "
                'pairs of values; use even sizes, or freeze_to_float8 without format="mxfp4"'
            )
        size[dim] //= 2
        strides = [stride // 2 for stride in strides]
        strides[dim] = 1
        first = self.plain.storage_offset() + int(first) // 2
        plain = self.plain.as_strided(size, strides, first)
        return self._made(type(self), plain, self.dtype, self.key, is_transposed)

    def inner_size(self, size: Sequence[int]) -> torch.Size:
        return torch.Size((*size[:-1], size[-1] // 2))


class StoredScales(Stored):
    """The scales of a frozen weight in float8. Their dtype never changes.

    Attributes:
        plain: the scales in float32; or their exponents in uint8, if all are powers of two.
        saved_as: the dtype of their entry in checkpoints: float32, or float8_e8m0fnu. Scales that
            are stored in float32 are always saved as float32.
    """

    saved_as: torch.dtype
    static = ("dtype", "saved_as")
    __slots__ = ("saved_as",)


def _check_copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """Raise NotImplementedError unless the bytes of ``source`` can be copied to ``to``."""
    dtypes = {x.plain.dtype if isinstance(x, Stored) else x.dtype for x in (to, source)}
    if not isinstance(to, Stored) or len(dtypes) > 1:
        raise NotImplementedError(
            f"copy_ of {kind_of(source)} of {source.dtype} to {kind_of(to)} of "
            f"{to.dtype}, one of which is stored in float8; {_REMEDY}"
        )


torch.serialization.add_safe_globals([StoredFloat8, PackedFloat8, StoredScales])
