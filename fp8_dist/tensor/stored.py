"""Parameters that are stored in float8: the data of a frozen weight, and its scales.

A weight that is not trained needs no copy in high precision. ``freeze_to_float8`` divides it into
two frozen parameters of its module: a :class:`StoredFloat8` under the weight's name, and a
:class:`StoredScales` under ``NAME_scale_inv``, as in FP8 checkpoints. FSDP2 and tensor parallelism
shard, gather, move and offload them like all parameters, but as the bytes that they are.
"""

from collections.abc import Callable
from inspect import signature
from operator import attrgetter
from typing import Any, ClassVar, Self

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.functional import pad

from fp8_dist.device import is_float8
from fp8_dist.torch_internals import (
    disabled_torch_function,
    make_wrapper,
    stable_hash,
    tensor_data,
    tree_leaves,
    tree_map_only,
)

aten, c10d = torch.ops.aten, torch.ops.c10d

# Operators that run on bytes, because some backends do not support float8.
_ON_BYTES = {
    aten.cat.default,
    aten.constant_pad_nd.default,
    c10d.broadcast_.default,
    c10d.scatter_.default,
}
# Operators, besides views, whose result is the same parameter, moved or about to be filled.
_SAME = _ON_BYTES | {
    aten.clone.default,
    aten.copy_.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten._pin_memory.default,
    aten._to_copy.default,
}
_ADDITIONS = {aten.add_.Tensor, aten.sub_.Tensor}


class Stored(torch.Tensor):
    """Base class of parameters that are moved as bytes.

    Attributes:
        stored: the plain tensor inside, of this tensor's shape. Its dtype is another one.
        static: the names of the other arguments of the constructor, and of their attributes.
        write: adds to the weight in high precision and casts it again, in place, given the
            operator and its other arguments; None if this is not the whole weight of a layer.
    """

    stored: torch.Tensor
    static: ClassVar[tuple[str, ...]]
    write: Callable[..., None] | None = None

    @staticmethod
    def __new__(
        cls, stored: torch.Tensor, /, *static: Any, requires_grad: Any = None, **_: Any
    ) -> Any:
        if requires_grad is not None:
            # A loader rebuilds a parameter p: ``type(p)(tensor, p.requires_grad, **p.__dict__)``.
            if not isinstance(stored, cls):
                raise NotImplementedError(
                    f"a loader rebuilds a parameter that is stored in float8 ({cls.__name__}) from "
                    f"data of {stored.dtype} alone, as accelerate's hooks do that offload weights; "
                    "keep the model on one device, or call fp8_dist.unfreeze_from_float8(model) "
                    "before it is offloaded"
                )
            return nn.Parameter(stored, requires_grad)
        self = make_wrapper(cls, stored, static[0], stored.is_pinned())
        self.stored = stored
        for name, value in zip(cls.static[1:], static[1:], strict=False):
            setattr(self, name, value)
        return self

    def like(self, stored: torch.Tensor, dtype: torch.dtype | None = None) -> Self:
        """Return a tensor of this kind with another content; ``dtype`` is one that was asked for.

        Scales keep their dtype: in ``model.to(torch.bfloat16)`` they must not be rounded.
        """
        return type(self)(stored, *self.__tensor_flatten__()[1])

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}({self.stored!r}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["stored"], tuple(getattr(self, name) for name in self.static)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], static: tuple[Any, ...], size: Any, stride: Any
    ) -> "Stored":
        return cls(inner["stored"], *static)

    _stable_hash_for_caching = stable_hash
    __torch_function__ = disabled_torch_function

    def data_ptr(self) -> int:
        """Return the address of the data, which accelerate uses as an identity."""
        return self.stored.data_ptr()

    def share_memory_(self) -> Self:
        """Move the data to shared memory, as torch.multiprocessing does."""
        self.stored.share_memory_()
        return self

    @property
    def data(self) -> torch.Tensor:
        """Data as in any tensor. Only a tensor of the same kind can be assigned."""
        return tensor_data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, type(self)):
            raise TypeError(
                "the .data of a weight that is stored in float8 can't become a "
                f"{type(value).__name__} of {value.dtype}; {_REMEDY}"
            )
        tensor_data.__set__(self, value)
        self.stored = value.stored

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            copied = self.like(self.stored.clone())
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(copied, False) if is_parameter else copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As bytes, because pickle does not support float8.
        parts = _bytes_of(self), self.stored.dtype, self.__tensor_flatten__()[1]
        return _rebuilt, (type(self), *parts, isinstance(self, nn.Parameter))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        own = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Stored))
        if not (func.is_view or func in _SAME):
            if func in _ADDITIONS and args[0] is own and own.write is not None:
                own.write(func, *args[1:], **kwargs)
                return own
            raise NotImplementedError(f"{func} on a weight that is stored in float8; {_REMEDY}")
        dtype = kwargs.pop("dtype", None) if func is aten._to_copy.default else None
        if func is aten.copy_.default:
            _check_copy(args[0], args[1])
        if func is aten.cat.default and any(type(each) is not cls for each in args[0]):
            raise NotImplementedError(
                "a weight that is stored in float8 can't be joined with other tensors, as "
                "DistributedDataParallel does to broadcast parameters; call freeze_to_float8 on "
                "the module that it wraps, as the last step before that"
            )
        content = _bytes_of if func in _ON_BYTES else attrgetter("stored")
        args_, kwargs_ = tree_map_only(Stored, content, (args, kwargs))
        out = func(*args_, **kwargs_)
        if func is aten.copy_.default:
            return args[0]
        if func is aten.detach.default:
            same = own.like(out)
            same.write = own.write  # ``weight.data += update``, as PEFT merges, casts the sum
            return same
        return tree_map_only(
            torch.Tensor, lambda plain: own.like(plain.view(own.stored.dtype), dtype), out
        )

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
        return (padded_shard(_bytes_of(self), outer_size, mesh.size()),), outer_size

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
        stored = unpadded(all_gather_outputs[0], self.stored.dtype, metadata)
        return self.like(stored, param_dtype), ()


# FSDP2 calls inspect.signature before each gather.
Stored.fsdp_pre_all_gather.__signature__ = signature(  # type: ignore[attr-defined]
    Stored.fsdp_pre_all_gather
)

_REMEDY = (
    "read it with fp8_dist.dequantized(layer), or call fp8_dist.unfreeze_from_float8(model) first"
)


class StoredFloat8(Stored):
    """The float8 data of a frozen weight.

    Its dtype is the one in high precision that the weight was cast from, and which gradients of the
    layer have. With a float8 dtype, adapters that are made like the weight would be float8.

    Attributes:
        stored: the data, in a float8 dtype.
        key: the key of the scaling scheme.
    """

    key: str
    static = ("dtype", "key")

    def like(self, stored: torch.Tensor, dtype: torch.dtype | None = None) -> Self:
        dtype = dtype if dtype is not None and dtype.is_floating_point else self.dtype
        return type(self)(stored, dtype, self.key)


class StoredScales(Stored):
    """The scales of a frozen weight that is stored in float8. Their dtype never changes.

    Attributes:
        stored: the scales in float32; or their exponents in uint8, if all are powers of two.
        saved_as: the dtype of their entry in checkpoints: float32, or float8_e8m0fnu. Scales that
            are stored in float32 are always saved in it.
    """

    saved_as: torch.dtype = torch.float32
    static = ("dtype", "saved_as")


def padded_shard(shard: torch.Tensor, outer_size: torch.Size, ranks: int) -> torch.Tensor:
    """Pad a shard with zeros to the size that FSDP2 gives every rank; contiguous.

    FSDP2 refuses uneven shards of other dims than the first. A parameter that every rank has whole
    (``replicate``) is no shard.
    """
    is_divided = len(shard) < outer_size[0] and shard.shape[1:] == outer_size[1:]
    missing = -(-outer_size[0] // ranks) - len(shard) if is_divided else 0
    assert missing >= 0, (shard.shape, outer_size, ranks)
    if missing:
        shard = pad(shard, (*(0, 0) * (shard.ndim - 1), 0, missing))
    return shard.contiguous()


def unpadded(output: torch.Tensor, dtype: torch.dtype, size: torch.Size) -> torch.Tensor:
    """Return FSDP2's all-gather output, of padded bytes, as a tensor of a dtype and a size."""
    return output.view(dtype).as_strided(size, torch.empty(size, device="meta").stride())


def _check_copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """Raise NotImplementedError unless the bytes of ``source`` can be copied to ``to``."""
    dtypes = {x.stored.dtype if isinstance(x, Stored) else x.dtype for x in (to, source)}
    if not isinstance(to, Stored) or len(dtypes) > 1:
        raise NotImplementedError(
            f"copy_ of a {type(source).__name__} of {source.dtype} to a {type(to).__name__} of "
            f"{to.dtype}, one of which is stored in float8; {_REMEDY}"
        )


def _bytes_of(each: Stored) -> torch.Tensor:
    return each.stored.view(torch.uint8) if is_float8(each.stored.dtype) else each.stored


def _rebuilt(
    cls: type[Stored],
    stored: torch.Tensor,
    dtype: torch.dtype,
    static: tuple[Any, ...],
    is_parameter: bool,
) -> torch.Tensor:
    made = cls(stored.view(dtype), *static)
    return nn.Parameter(made, requires_grad=False) if is_parameter else made


torch.serialization.add_safe_globals([StoredFloat8, StoredScales, _rebuilt])
