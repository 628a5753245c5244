"""The base class of parameters that wrap a plain tensor."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial, wraps
from inspect import signature
from typing import Any, ClassVar, Self

import torch
from torch.nn.functional import pad

from fp8_dist import torch_internals
from fp8_dist.tensor.subclass import TensorSubclass

aten, c10d = torch.ops.aten, torch.ops.c10d

# Operators, besides views, that return a parameter of the same type: a copy, or one yet to fill.
MOVES = {
    aten.clone.default,
    aten.copy_.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten._pin_memory.default,
    aten._to_copy.default,
    c10d.broadcast_.default,
    c10d.scatter_.default,
}


class WrapperParameter(TensorSubclass):
    """Base class of parameters that wrap a plain tensor.

    A subclass defines the dispatch of operators, assignments to ``data``, and the hooks of FSDP2's
    all-gather. Its attributes are slots, because loaders pass the dict of a parameter to its type.

    Attributes:
        plain: the plain tensor inside, of this tensor's shape unless it is packed. It may have
            another dtype.
        static: the names of the other arguments of the constructor, and of their attributes.
            ``dtype`` is by default that of ``plain``.
        parts: the names of the inner tensors. The constructor takes those after ``plain`` by name.
    """

    plain: torch.Tensor
    static: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[str, ...]] = ("plain",)
    __slots__ = ("plain",)

    def __init_subclass__(cls) -> None:
        if (hook := vars(cls).get("fsdp_pre_all_gather")) is not None:
            cls.fsdp_pre_all_gather = _with_signature(hook)  # type: ignore[attr-defined]

    @staticmethod
    def __new__(
        cls, plain: torch.Tensor, /, *static: Any, requires_grad: Any = None, **parts: Any
    ) -> Any:
        if requires_grad is not None:
            # A loader rebuilds a parameter p: ``type(p)(tensor, p.requires_grad, **p.__dict__)``.
            # Of a plain tensor this is a plain parameter.
            cls.check_rebuilds(plain)
            return torch.nn.Parameter(plain, requires_grad)
        values = dict(zip(cls.static, static, strict=True))
        dtype, shape = values.pop("dtype", plain.dtype), cls.shape_of(plain, *static)
        # Under inference_mode too, a view of a parameter is not an inference tensor.
        with torch.inference_mode(plain.is_inference()):
            self = torch_internals.make_wrapper(cls, plain, dtype, plain.is_pinned(), shape)
            self.plain = plain
            for name, value in values.items():
                setattr(self, name, value)
            self.set_up(**parts)
        return self

    @classmethod
    def check_rebuilds(cls, plain: torch.Tensor) -> None:
        """Raise NotImplementedError if a loader can't rebuild a parameter from this tensor."""

    @staticmethod
    def shape_of(plain: torch.Tensor, *static: Any) -> tuple[list[int], list[int]] | None:
        """The size and the strides of the parameter; ``None``: those of ``plain``."""
        return None

    def set_up(self) -> None:
        """Set the attributes that are not ``static``, given the other ``parts`` by name."""

    def like(self, plain: torch.Tensor, dtype: torch.dtype | None = None) -> Self:
        """Return a tensor of this type around another plain tensor.

        The base class ignores ``dtype``, because ``model.to(torch.bfloat16)`` must not round
        scales.
        """
        return type(self)(plain, *self.__tensor_flatten__()[1])

    def assigned(self, value: torch.Tensor) -> Self:
        """Convert an assignment to ``data`` to a tensor of this type, or raise TypeError."""
        raise NotImplementedError

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}({self.plain!r}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return [*self.parts], tuple(getattr(self, name) for name in self.static)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], static: tuple[Any, ...], size: Any, stride: Any
    ) -> Self:
        return cls(inner["plain"], *static, **{name: inner[name] for name in cls.parts[1:]})

    def readable(self, reader: str) -> torch.Tensor:
        return self.plain.detach().requires_grad_(self.requires_grad)

    def data_ptr(self) -> int:
        """Return the address of the plain tensor's data, which accelerate uses as an identity."""
        return self.plain.data_ptr()

    def set_(self, *args: Any) -> torch.Tensor:
        # torch calls this to let fake tensors share memory, which the inner tensors already do.
        return self if isinstance(self.plain, torch_internals.STAND_INS) else super().set_(*args)

    @property
    def data(self) -> torch.Tensor:
        """The tensor's data. An assignment also replaces the plain tensor inside."""
        return torch_internals.tensor_data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        assigned = self.assigned(value)
        torch_internals.tensor_data.__set__(self, assigned)
        self.plain = assigned.plain

    # torch's own copying and pickling assume that a tensor with an address has a storage.
    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            plain, attributes = deepcopy(self.plain, memo), deepcopy(self.__dict__, memo)
            rest = self.__tensor_flatten__()[1], self.requires_grad, attributes
            memo[id(self)] = copied = rebuilt(type(self), plain, plain.dtype, *rest)
            copied.grad = deepcopy(self.grad, memo)
        return memo[id(self)]

    def __copy__(self) -> torch.Tensor:
        copied = self.detach().requires_grad_(self.requires_grad)
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.readable("pickle")  # so that files load without this library
        if isinstance(self, torch.nn.Parameter) and self.is_leaf:
            plain = torch.nn.Parameter(plain, self.requires_grad)
        vars(plain).update({k: v for k, v in vars(self).items() if k != "_is_param"})
        return plain.__reduce_ex__(protocol)


def _with_signature(method: Callable[..., Any]) -> property:
    """A method that stores its signature, which FSDP2 inspects before each gather.

    Inspecting a bound method takes ten times as long.
    """
    inspected = signature(partial(method, None))

    @wraps(method)
    def bound(self: Any) -> Any:
        call: Any = partial(method, self)
        call.__signature__ = inspected
        return call

    return property(bound)


def rebuilt(
    cls: type[WrapperParameter],
    plain: torch.Tensor,
    dtype: torch.dtype,
    static: tuple[Any, ...],
    requires_grad: bool,
    attributes: dict[str, Any],
) -> torch.Tensor:
    """Make a copied or unpickled parameter."""
    parameter = cls(plain.view(dtype), *static).requires_grad_(requires_grad)
    parameter.__dict__.update(attributes)  # such as the mark of an nn.Parameter
    return parameter


def bytes_of(plain: torch.Tensor) -> torch.Tensor:
    """Return float8 data as uint8, because pickle and some backends do not support float8."""
    return plain.view(torch.uint8) if plain.itemsize == 1 else plain


def padded_shard(shard: torch.Tensor, rows: int) -> torch.Tensor:
    """Pad a shard with zeros to a number of rows (:func:`padded_size`); contiguous."""
    if missing := rows - len(shard):
        shard = pad(shard, (*(0, 0) * (shard.ndim - 1), 0, missing))
    return shard.contiguous()


def padded_size(shard: torch.Tensor, outer_size: torch.Size, ranks: int) -> tuple[int, ...]:
    """The size that FSDP2 gives the shards of all ranks.

    FSDP2 rejects uneven shards of any dim but the first. A parameter that is whole on every rank
    (``replicate``) is not padded.
    """
    is_divided = len(shard) < outer_size[0] and shard.shape[1:] == outer_size[1:]
    rows = -(-outer_size[0] // ranks) if is_divided else len(shard)
    assert rows >= len(shard), (shard.shape, outer_size, ranks)
    return rows, *shard.shape[1:]


def unpadded(output: torch.Tensor, dtype: torch.dtype, size: torch.Size) -> torch.Tensor:
    """View FSDP2's all-gather output, which has padded bytes, as a tensor of a dtype and size."""
    return output.view(dtype).as_strided(size, torch.empty(size, device="meta").stride())


torch.serialization.add_safe_globals([rebuilt])
