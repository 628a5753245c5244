"""A weight whose tensor holds what is known of its values.

Note [What is known of a weight]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A scale that covers the values of several ranks takes an all-reduce. So the statistics of a weight
are kept until the weight is written to. Precompute stores them, and so does an all-gather of FSDP2
in float8. A forward stores none, because ranks without tokens for an expert skip it. Whoever casts
a weight takes what is known, or measures the weight.

They are kept in the weight's own tensor, a :class:`KnownWeight`. ``plain`` has the values,
``known`` the statistics, and ``valid`` tells whether these are of the values. An operator that
writes to the weight, or to a view of it, runs in ``KnownWeight.__torch_dispatch__``, which marks
``valid``. So optimizers are noticed (foreach, fused and compiled ones, too), ``.data``,
``to_local()`` and collectives. A write to ``plain`` itself, as by an in-place checkpoint loader,
raises the version counter of ``plain``, which is a part of ``valid``. A write through a DTensor
that ``state_dict()`` returned raises only the counter that this DTensor shares with the parameter,
which compiled code can't see. docs/state.md lists the writes that nothing notices.

``known`` and ``valid`` are tensors, because they are inputs of compiled graphs. One graph serves a
weight that is known and one that is not: an operator looks at them when it runs
(``fp8_dist/linear/weight.py``). A graph that writes to a weight marks ``valid``, too.

Views share ``valid``, so that a write to a view is noticed. They know nothing themselves, because
their plain tensors count versions apart. Copies and moved tensors know nothing either.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8_dist.device import is_captured
from fp8_dist.mesh import Layout
from fp8_dist.scaling import (
    Scheme,
    Start,
    Statistics,
    common_start,
    empty_statistics,
    packed,
    unpacked,
)
from fp8_dist.tensor.wrapper import MOVES, WrapperParameter
from fp8_dist.torch_internals import (
    outside_of_modes,
    storage_address,
    tree_leaves,
    tree_map_only,
    version_of,
    written_arguments,
)

aten = torch.ops.aten

# Values of `valid`. Any other is four times a fingerprint of what is known, plus who found it.
AS_SHARDED = 0  # of what FSDP2 gathered in high precision: ask the sharded parameter
PRECOMPUTED, TRAINED = 1, 2  # precompute found it; a forward or gather for training found it
# The latter alone: it is not kept. A write turns PRECOMPUTED to STALE, and TRAINED to OUTDATED.
UNKNOWN, STALE, OUTDATED = -1, -2, -3


class Kept(NamedTuple):
    """Which statistics of a weight are kept together.

    Attributes:
        schemes: those that they are for.
        layout: that of the weight as a rank has it, or as FSDP2 gathers it.
        whole: whether they are those of the whole weight, not of the rank's part.
    """

    schemes: tuple[Scheme, ...]
    layout: Layout
    whole: bool = False

    def unpack(self, known: Tensor, shape: Sequence[int]) -> dict[Scheme, Statistics]:
        """The inverse of :func:`packed`, for a part of this shape."""
        shape, start = (self.layout.shape, (0, 0)) if self.whole else (shape, self.start())
        return dict(zip(self.schemes, unpacked(known, self.schemes, shape, start), strict=True))

    def start(self) -> Start:
        """The :func:`common_start` of the schemes."""
        return common_start(self.schemes, self.layout)


class KnownWeight(WrapperParameter):
    """A weight, or a shard of one, in high precision, with what is known of its values.

    Every operator on it runs on the plain tensor inside. A ``state_dict`` contains the plain
    tensor. See Note [What is known of a weight].

    Attributes:
        known: 1-D, integers: packed statistics; empty if nothing was known yet.
        valid: int64, 0-dim, on the CPU: a fingerprint of what is known, or a value above.
        seen: the version of the parameter, which may be a DTensor, when it was measured.
    """

    known: Tensor
    valid: Tensor
    seen: int
    parts: ClassVar[tuple[str, ...]] = ("plain", "known", "valid")
    __slots__ = ("known", "seen", "valid")

    @staticmethod
    def __new__(
        cls,
        plain: Tensor,
        /,
        *static: Any,
        known: Tensor | None = None,
        valid: Tensor | None = None,
        requires_grad: Any = None,
        **_: Any,
    ) -> "KnownWeight":
        if requires_grad is not None:
            # A loader rebuilds a parameter p: ``type(p)(tensor, p.requires_grad, **p.__dict__)``.
            # Of a plain tensor this is a plain parameter.
            return nn.Parameter(plain, requires_grad)  # type: ignore[return-value]
        self = cls.made(plain, plain.dtype)
        for name, value in zip(cls.static, static, strict=True):
            setattr(self, name, value)
        self.known = plain.new_empty(0, dtype=torch.int32) if known is None else known
        self.valid, self.seen = _flag() if valid is None else valid, 0
        return self

    @staticmethod
    def unwrap(tensor: Tensor) -> Tensor:
        """Return the plain tensor inside; any other tensor is returned unchanged."""
        return tensor.plain if isinstance(tensor, KnownWeight) else tensor

    @classmethod
    def as_sharded(cls, plain: Tensor, parameter: Tensor) -> Self:
        """Wrap the local tensor of an unsharded parameter; it is known as the sharded one is."""
        self: Self = cls(plain)
        self.valid.fill_(AS_SHARDED)
        self.seen = version_of(parameter) or 0
        return self

    def reserve(self, kept: Kept) -> None:
        """Give ``known`` the shape that it will have, on which graphs depend."""
        keys = [scheme.key for scheme in kept.schemes]
        self.known = torch.cat(packed([tuple(empty_statistics(self.plain, keys, kept.start()))]))

    def has(self, flag: int) -> bool:
        """Whether ``valid`` is one of the values above; not in graphs."""
        return self._state() == flag

    def check(self, parameter: Tensor) -> Self:
        """Forget what is known if the parameter that has this tensor has another version."""
        # (Loaders write so to tensors of a state dict. Other writes have been noted.)
        if self.seen != (version_of(parameter) or 0) and self._state() >= 0:
            self.forget_to_load()
        return self

    def recall(self, kept: Kept, x: Tensor) -> dict[Scheme, Statistics]:
        """Return what is known of the current values, empty if that is nothing; not in graphs.

        While a CUDA graph is captured nothing is: it is replayed with other values.

        ``x``: the values, perhaps on another device. The result is there.
        """
        valid = self._state()
        known = valid > AS_SHARDED and valid >> 2 == self._fingerprint(kept)
        return kept.unpack(self.known.to(x.device), x.shape) if known and not is_captured(x) else {}

    def store(
        self, kept: Kept, each: Sequence[Statistics], parameter: Tensor, found_by: int = 0
    ) -> None:
        """Store statistics of the current values.

        Args:
            each: those for each scheme.
            parameter: the parameter that has this tensor.
            found_by: PRECOMPUTED, TRAINED, or 0 for others, such as an evaluation.
        """
        parts = packed(each)
        self.known = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.seen = version_of(parameter) or 0
        self._set_state(4 * self._fingerprint(kept) + found_by)

    def note_training(self) -> None:
        """Note that a forward for training has found statistics, which it does not keep."""
        if self._state() < 0:
            self._set_state(TRAINED)

    def _fingerprint(self, kept: Kept) -> int:
        """A positive number that stands for the values, what is known, and what that is."""
        number = hash((version_of(self.plain), storage_address(self.known), kept))
        return 1 + (number & (1 << 60) - 1)

    def forget(self) -> None:
        """Note a write to the values."""
        if type(self.valid) is not Tensor:  # a graph is traced, which marks it when it runs
            written = -1 - (self.valid & 3)
            self.valid.copy_(torch.where(self.valid < 0, self.valid, written))
            return
        if (valid := self._state()) >= 0:
            self._set_state(-1 - (valid & 3))

    def forget_to_load(self) -> None:
        """Note that a state dict is loaded, of which nothing is to be said."""
        self._set_state(UNKNOWN)

    def _state(self) -> int:
        with outside_of_modes():
            return int(self.valid)

    def _set_state(self, value: int) -> None:
        with outside_of_modes():
            self.valid.fill_(value)

    def assigned(self, value: Tensor) -> Self:
        if isinstance(value, DTensor) or not value.is_floating_point():
            raise TypeError(
                "the .data of a float8 layer's weight must be a plain floating-point tensor, got "
                f"{type(value).__name__} of {value.dtype}; assign a new nn.Parameter to "
                "layer.weight instead"
            )
        self.forget()
        return self.like(self.unwrap(value.detach()))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        args_, kwargs_ = tree_map_only(KnownWeight, cls.unwrap, (args, kwargs))
        out = func(*args_, **kwargs_)
        for tensor in tree_leaves(written_arguments(func, args, kwargs)):
            if isinstance(tensor, KnownWeight):
                tensor.forget()
        if func is aten.copy_.default:
            return args[0]
        if func is aten.clone.default and kwargs_.get("memory_format") is torch.preserve_format:
            return out  # this is how optimizers clone their state; clone() of a shard is a weight
        if not (func.is_view or func in MOVES):
            return out
        own = next(each for each in tree_leaves(args) if isinstance(each, KnownWeight))
        wrapped = tree_map_only(Tensor, own.like, out)
        if func.is_view:
            for view in [wrapped] if isinstance(wrapped, cls) else wrapped:
                view.valid = own.valid
        return wrapped


def _flag() -> Tensor:
    # A normal tensor on the host, which may be written to in any mode.
    if torch.compiler.is_compiling():
        return torch.full((), UNKNOWN, dtype=torch.int64, device="cpu")
    with torch.inference_mode(False), outside_of_modes():
        return torch.full((), UNKNOWN, dtype=torch.int64, device="cpu")
