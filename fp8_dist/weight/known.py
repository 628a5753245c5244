"""A parameter with cached amax statistics.

Note [What is known of a weight]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A scale that covers the values of several ranks needs an all-reduce. Therefore the statistics of a
weight are cached until the weight is written to. Precompute stores them, and so does FSDP2's float8
all-gather. A forward does not, because ranks without tokens for an expert skip it. A cast looks
them up, or else measures the weight.

The cache is in the weight's own tensor, a :class:`KnownWeight`: ``plain`` has the values, ``known``
the statistics, and ``valid`` says whether the statistics belong to the values. Operators that write
to the weight, or to a view of it, run in ``KnownWeight.__torch_dispatch__``, which invalidates the
cache. So writes by optimizers (foreach, fused and compiled ones, too), through ``.data`` or
``to_local()``, and by collectives are noticed. A write to ``plain`` itself, such as by an in-place
checkpoint loader, increments the version counter of ``plain``, which is a part of ``valid``. A
write through a DTensor that ``state_dict()`` returned increments only the counter that this DTensor
shares with the parameter, and compiled code can't see that counter. docs/state.md lists the writes
that are not noticed.

``known`` and ``valid`` are tensors, because they are inputs of compiled graphs. One graph serves a
weight whether its cache is valid or not: an operator reads the cache at run time
(:mod:`fp8_dist.operand.state`). A graph that writes to a weight invalidates its cache, too.

Views share ``valid``, so that a write to a view is noticed. They have no statistics of their own,
because the version counters of their plain tensors are separate. Nor do copies and moved tensors.

Note [Captures]
~~~~~~~~~~~~~~~
Statistics that are computed while a CUDA graph is captured are those of a replay. They are used in
the same capture alone, whose number is a part of ``valid``. A replay of a graph invalidates the
cache of each weight that its capture wrote to, updated the scales of, or measured for training.
(Compiled code that is captured writes without a call of :meth:`KnownWeight.forget`.)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8_dist import scaling, torch_internals
from fp8_dist.device import call_at_replays, current_capture
from fp8_dist.mesh import Layout
from fp8_dist.operand.state import State, measured
from fp8_dist.scaling import (
    CastPlan,
    Scheme,
    Start,
    Statistics,
    operators,
    reduction,
    shared_schemes,
)
from fp8_dist.text import warn_once
from fp8_dist.torch_internals import tree_map_only, version_of
from fp8_dist.weight.wrapper import MOVES, WrapperParameter

aten = torch.ops.aten

# Sources of statistics. Without a fingerprint they are states of no statistics, too.
EVALUATED = 0  # a forward or gather of an evaluation
PRECOMPUTED = 1  # precompute
TRAINED = 2  # a forward or gather of training
# States without statistics. A write turns EVALUATED into UNKNOWN, PRECOMPUTED into STALE, TRAINED
# into OUTDATED.
UNKNOWN, STALE, OUTDATED = -1, -2, -3
# An unsharded parameter, whose statistics are looked up on the sharded one.
AS_SHARDED = 0

_LISTS = (list, tuple)


def _is_invalid(valid: Any) -> Any:
    """Whether there are no statistics, or the weight was written to after they were computed."""
    return valid < 0


def _invalidated(valid: Any) -> Any:
    """The value of ``valid`` after a write."""
    return -1 - (valid & 3)


def _invalidate(valid: Tensor) -> None:
    """Invalidate statistics after a write."""
    with torch_internals.outside_of_modes():
        if not _is_invalid(state := int(valid)):
            valid.fill_(_invalidated(state))


@dataclass(frozen=True)
class Kept:
    """The statistics of a weight that are cached together.

    Attributes:
        schemes: the schemes of the statistics.
        layout: the layout of the weight as a rank has it, or as FSDP2 gathers it.
        whole: whether the statistics are of the whole weight instead of the rank's part.
        needs_ranks: whether some of the statistics cover values of several ranks.
        number: the hash, which each look-up takes.
    """

    schemes: tuple[Scheme, ...]
    layout: Layout
    whole: bool = False

    needs_ranks: ClassVar[bool]
    number: ClassVar[int]

    def __post_init__(self) -> None:
        needs_ranks = self.whole or bool(shared_schemes(self.schemes, self.layout))
        object.__setattr__(self, "needs_ranks", needs_ranks)
        object.__setattr__(self, "number", hash((self.schemes, self.layout, self.whole)))

    def __hash__(self) -> int:
        return self.number

    @staticmethod
    @lru_cache(maxsize=4096)
    def in_forward(schemes: tuple[Scheme, ...], layout: Layout) -> "Kept":
        """The statistics that a forward takes from a cache; not in graphs."""
        return Kept(shared_schemes(schemes, layout), layout)

    def unpack(self, known: Tensor, shape: Sequence[int]) -> dict[Scheme, Statistics]:
        """The inverse of :func:`fp8_dist.scaling.reduction.packed`, for a part of this shape."""
        shape, start = (self.layout.shape, (0, 0)) if self.whole else (shape, self.start())
        statistics = reduction.unpacked(known, self.schemes, shape, start)
        return dict(zip(self.schemes, statistics, strict=True))

    def start(self) -> Start:
        """The :func:`fp8_dist.scaling.common_start` of the schemes."""
        return scaling.common_start(self.schemes, self.layout)


class Known(State):
    """The cached statistics of a weight; those that are not cached are measured.

    Args:
        owner: the ``Float8Weight``.
        weight: the local tensor that has the cache.
        kept: which statistics are cached; ``None`` in a graph, where an operator reads the cache.
        parameter: in a gather of FSDP2, the parameter of ``weight``, for which new statistics are
            cached; ``None`` in a forward.
    """

    def __init__(
        self,
        owner: Any,
        weight: "KnownWeight",
        kept: Kept | None = None,
        parameter: Tensor | None = None,
    ) -> None:
        self.handle, self.cache = owner.handle, (weight.known, weight.valid)
        self.is_gather = parameter is not None
        self._owner, self._weight, self._kept, self._parameter = owner, weight, kept, parameter

    def read(self, x: Tensor, plan: CastPlan) -> list[Statistics]:
        """The statistics that are cached, or measured and perhaps cached now; not in graphs."""
        assert self._kept is not None
        state = self._weight.state()
        found = {} if _is_invalid(state) else self._weight.recall(self._kept, x, state)
        if not found:
            return self._measured(x, plan, state)
        if missing := tuple([scheme for scheme in plan.schemes if scheme not in found]):
            found |= zip(missing, self._measured(x, CastPlan(missing), state), strict=True)
        return [found[scheme] for scheme in plan.schemes]

    def _measured(self, x: Tensor, plan: CastPlan, state: int) -> list[Statistics]:
        """Statistics that are not cached; those of a gather are cached now."""
        weight, kept = self._weight, self._kept
        assert kept is not None
        is_training = self._owner.module.training
        trains = is_training and kept.needs_ranks
        if trains and state in (STALE, OUTDATED):
            _warn_of_stale(self._owner.fqn)
        if is_training:  # replays of an evaluation write nothing
            weight.follow_replays()
        if plan.layout is not kept.layout:  # FSDP2's axes may be missing in that of a forward
            plan = plan.on(kept.layout)
        statistics = measured(x, plan, kept.whole)
        if self._parameter is not None:
            # (Statistics that an evaluation computes after a step also serve the next step.)
            source = TRAINED if trains or state == OUTDATED else EVALUATED
            weight.store(kept, reduction.packed(statistics), self._parameter, source)
        elif trains:
            weight.note_training()
        return statistics


def _warn_of_stale(fqn: str) -> None:
    """Warn once about an all-reduce that an update of scales would have avoided."""
    warn_once(
        "stale scale",
        f"{fqn}: the weight was written to after its scales were computed, and no update of scales "
        "has followed, so they are computed again in this step, with one all-reduce per sharded "
        "weight. Call attach_update(optimizer, model) once, or update_float8_scales(model) "
        "(precompute_float8_dynamic_scale) after each optimizer.step() and other changes",
    )


class KnownWeight(WrapperParameter):
    """Parameter (or shard) in high precision with cached amax statistics.

    Operators run on the plain tensor inside. A ``state_dict`` contains the plain tensor. See Note
    [What is known of a weight].

    Attributes:
        known: packed statistics, 1-D integers; empty until statistics are stored or reserved.
        valid: int64, 0-dim, on the CPU: fingerprint and source of the statistics, or a state above.
        seen: the version of the parameter, which may be a DTensor, when it was measured.
    """

    known: Tensor
    valid: Tensor
    seen: int
    parts: ClassVar[tuple[str, ...]] = ("plain", "known", "valid")
    __slots__ = ("known", "seen", "valid")

    def set_up(self, known: Tensor | None = None, valid: Tensor | None = None) -> None:
        self.known = self.plain.new_empty(0, dtype=torch.int32) if known is None else known
        self.valid, self.seen = _flag() if valid is None else valid, 0

    @staticmethod
    def unwrap(tensor: Tensor) -> Tensor:
        """Return the plain tensor inside; any other tensor is returned unchanged."""
        return tensor.plain if isinstance(tensor, KnownWeight) else tensor

    @classmethod
    def as_sharded(cls, plain: Tensor, parameter: Tensor) -> Self:
        """Wrap the local tensor of an unsharded parameter.

        Statistics are looked up on the sharded parameter.
        """
        self: Self = cls(plain)
        self.valid.fill_(AS_SHARDED)
        self.seen = version_of(parameter) or 0
        return self

    def reserve(self, kept: Kept) -> None:
        """Preallocate the statistics buffer, on whose shape graphs depend."""
        keys = [scheme.key for scheme in kept.schemes]
        statistics = tuple(operators.empty_statistics(self.plain, keys, kept.start()))
        self.known = reduction.packed([statistics])

    def check(self, parameter: Tensor) -> Self:
        """Drop the statistics if the version of the parameter that holds this tensor changed."""
        # (It does if a loader wrote to a state dict's DTensor. Other writes were noticed at once.)
        if self.seen != (version_of(parameter) or 0) and not _is_invalid(self.state()):
            self.forget_to_load()
        return self

    def recall(self, kept: Kept, x: Tensor, state: int) -> dict[Scheme, Statistics]:
        """Return the cached statistics of the current values, by scheme; not in graphs.

        Args:
            x: the values, perhaps on another device. The result is on the device of ``x``.
            state: the :meth:`state`.
        """
        if state >> 2 != self._fingerprint(kept):
            return {}
        return kept.unpack(self.known.to(x.device), x.shape)

    def store(self, kept: Kept, known: Tensor, parameter: Tensor, source: int) -> None:
        """Cache statistics of the current values.

        Args:
            known: the :func:`fp8_dist.scaling.reduction.packed` statistics.
            parameter: the parameter that holds this tensor.
            source: one of the sources above.
        """
        self.known = known
        self.seen = version_of(parameter) or 0
        self._set_state((self._fingerprint(kept) << 2) + source)

    def note_writes(self) -> None:
        """Make later writes change ``valid``, although it has no statistics."""
        if _is_invalid(self.state()):
            self._set_state(EVALUATED)

    def note_training(self) -> None:
        """Record that a forward of training has computed statistics without caching them."""
        if _is_invalid(self.state()):
            self._set_state(TRAINED)

    def _fingerprint(self, kept: Kept) -> int:
        """Hash of version, storage, layout and capture; positive."""
        address = torch_internals.storage_address(self.known)
        number = hash((version_of(self.plain), address, kept.number, current_capture()))
        return 1 + (number & (1 << 60) - 1)

    def forget(self) -> None:
        """Invalidate the statistics after a write."""
        if type(valid := self.valid) is not Tensor:  # traced: the graph does it when it runs
            valid.copy_(torch.where(_is_invalid(valid), valid, _invalidated(valid)))
        else:
            self.follow_replays()
            _invalidate(valid)

    def follow_replays(self) -> None:
        """In a capture, let replays invalidate the statistics; see Note [Captures]."""
        call_at_replays(id(self.valid), partial(_invalidate, self.valid))

    def forget_to_load(self) -> None:
        """Drop the statistics before a state dict is loaded, without a later warning."""
        self._set_state(UNKNOWN)

    def state(self) -> int:
        """The value of ``valid``; not in graphs."""
        with torch_internals.outside_of_modes():
            return int(self.valid)

    def _set_state(self, value: int) -> None:
        with torch_internals.outside_of_modes():
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
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        args_, values = _unwrapped(args), _unwrapped(kwargs.values())
        kwargs_ = dict(zip(kwargs, values, strict=True))
        out = func(*args_, **kwargs_)
        for weight in _weights_in(torch_internals.written_arguments(func, args, kwargs)):
            weight.forget()
        if func is aten.copy_.default:
            return args[0]
        if func is aten.clone.default and kwargs_.get("memory_format") is torch.preserve_format:
            return out  # as optimizers do for their state; clone() of a shard remains a weight
        if not (func.is_view or func in MOVES):
            return out
        weight = next(_weights_in(args))
        wrapped = tree_map_only(Tensor, weight.like, out)
        if func.is_view:
            for view in [wrapped] if isinstance(wrapped, cls) else wrapped:
                view.valid = weight.valid
        return wrapped


# Operators take no containers but lists. torch's functions for trees take several times as long.
def _unwrapped(arguments: Iterable[Any]) -> list[Any]:
    """An operator's arguments with the plain tensors of weights."""
    return [_unwrapped(x) if type(x) in _LISTS else KnownWeight.unwrap(x) for x in arguments]


def _weights_in(arguments: Iterable[Any]) -> Iterator[KnownWeight]:
    """The weights in an operator's arguments."""
    for x in arguments:
        if isinstance(x, KnownWeight):
            yield x
        elif type(x) in _LISTS:
            yield from _weights_in(x)


def _flag() -> Tensor:
    # A normal tensor on the host, which can be written to in any mode.
    if torch.compiler.is_compiling():
        return torch.full((), UNKNOWN, dtype=torch.int64, device="cpu")
    with torch_internals.normal_tensors(), torch_internals.outside_of_modes():
        return torch.full((), UNKNOWN, dtype=torch.int64, device="cpu")
