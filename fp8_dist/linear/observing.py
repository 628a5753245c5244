"""Observers of the casts and GEMMs of layers, for statistics, captures and tests.

Without an observer a cast costs one check of a Python variable, and no operator. Compiled code
compiles once more when it is first observed, and keeps both graphs. GEMMs are only observed in
eager code.

An input that ``PrepareFloat8ModuleInput`` casts for several layers is *prepared*. Its cast and its
uses are in different places, perhaps with a gather in between, and a module may have several such
inputs. Therefore each cast has a number, which the Float8Tensor carries to the layers.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fp8_dist.cast import Copies
from fp8_dist.config import Float8LinearConfig
from fp8_dist.kernels import GemmOptions
from fp8_dist.linear.queries import owner_of, query
from fp8_dist.mesh import local_tensor, with_local
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import Quantized, Scheme, flat, matrices, operand_of
from fp8_dist.tensor import Float8Tensor, scales_of
from fp8_dist.torch_internals import STAND_INS, in_backward, without_dispatch_modes

R = TypeVar("R")
# The float8 copies of an operand, by the GEMMs that take each.
Casts = Mapping[tuple[Gemm, ...], Quantized]


class Owner(Protocol):
    """The owner of a cast operand: a layer's ``float8_weight``."""

    fqn: str
    config: Float8LinearConfig
    handle: torch.Tensor  # identifies the owner in operators (``queries``)

    def high_precision(self, weight: torch.Tensor) -> torch.Tensor:
        """The high-precision parameter of a forward's weight, detached: plain or a DTensor."""

    def casts_of(self, operand: Operand) -> dict[tuple[Gemm, ...], Scheme]:
        """The schemes of the casts of an operand, by the GEMMs that take each."""

    def gemms_of(self, operand: Operand, scheme: Scheme) -> tuple[Gemm, ...]:
        """The GEMMs that take the cast of an operand by a scheme."""


class Observer:
    """Base class of observers of casts and GEMMs.

    A subclass overrides methods, which must not change the tensors that they are given. They are
    called without gradients and outside dispatch modes.
    """

    def on_casts(self, owner: Owner, operand: Operand, high: torch.Tensor, lows: Casts) -> None:
        """Called when a local operand was cast for GEMMs.

        ``high`` is ``[..., K]`` in high precision. ``lows`` are float8 copies of the same shape, by
        the GEMMs that take them. In eager code one call contains all copies of a cast operand.
        """

    def on_prepared_cast(self, owner: Owner, high: torch.Tensor, low: Quantized) -> object:
        """Called when a local input was prepared by the config of ``owner``.

        The result is passed to :meth:`on_prepared_use`.
        """
        return None

    def on_prepared_use(self, owner: Owner, kept: Any) -> None:
        """Called when a layer takes a prepared input, perhaps gathered since its cast.

        ``kept`` is the result of :meth:`on_prepared_cast`; None if the cast was not observed.
        """

    def on_gemm(
        self,
        owner: Owner,
        gemm: Gemm,
        left: torch.Tensor,
        right: torch.Tensor,
        result: torch.Tensor,
    ) -> None:
        """Called after a GEMM of a layer in eager code.

        ``left`` is the input or grad_output, ``[..., K]``. ``right`` is the weight, or the input
        for grad_weight. Both are in high precision, as they were before casts and moves. ``result``
        is the result of the float8 GEMM. All of them are plain tensors, or DTensors of any
        placements. All ranks of their meshes get the same calls, so this may communicate.
        """


class _Shown(NamedTuple):
    """The state of an observer."""

    gemms: bool  # whether it is shown GEMMs too
    casts: set[Hashable]  # those outside a backward
    kept: dict[int, object]  # results of Observer.on_prepared_cast, by the number of the cast


_observers: dict[Observer, _Shown] = {}
_is_observed = False  # what graphs guard on: guards on the dict would include its items
_recordings: dict[int, list["GemmRecord"]] = {}  # by id: two recordings of the same are equal
# Prepared inputs in high precision, by the cast number of the Float8Tensors made from each. Eager
# code passes the number's tensor on, so an input is kept as long as one of its Float8Tensors lives.
_prepared: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()
_cast_numbers = itertools.count()


def is_observed() -> bool:
    """Whether there is an observer."""
    return _is_observed


def are_gemms_observed() -> bool:
    """Whether there is an observer of GEMMs; False in compiled code."""
    is_eager = _is_observed and not torch.compiler.is_compiling()
    return is_eager and any(shown.gemms for shown in _observers.values())


@contextmanager
def observed_by(observer: Observer, gemms: bool = False) -> Iterator[None]:
    """Show an observer the casts of all layers inside the block.

    With ``gemms``, show it their GEMMs too, and run all code in the block eagerly.
    """
    global _is_observed
    _observers[observer] = _Shown(gemms, set(), {})
    _is_observed = True
    try:
        with torch.compiler.set_stance("force_eager") if gemms else nullcontext():
            yield
    finally:
        del _observers[observer]
        _is_observed = bool(_observers)


def _tell(method: Callable[..., R], *arguments: Any) -> R:
    """Call a method of an observer without gradients, outside dispatch modes."""
    with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        return method(*arguments)


def observe(
    owner: Owner,
    operand: Operand,
    gemms: tuple[Gemm, ...],
    high: torch.Tensor,
    low: Quantized,
    repeats: bool,
    used: torch.Tensor | None = None,
) -> torch.Tensor:
    """Show observers a cast.

    Args:
        repeats: whether a backward may repeat the cast (activation checkpointing, FSDP2's second
            gather). Such a cast is shown once.
        used: a tensor that the layer uses afterwards; None for the first scale of ``low``.

    Returns:
        The tensor to use in place of ``used``. Otherwise a graph would drop the operator.
    """
    used = low.scales[0] if used is None else used
    if not torch.compiler.is_compiling():
        _show(owner, operand, high, {gemms: low}, repeats)
        return used
    of = operand, list(gemms), high.detach()
    return observe_cast.overload(used, owner.handle, *of, *flat(low), repeats)[0]


def observe_copies(
    owner: Owner,
    operand: Operand,
    high: torch.Tensor,
    made: Copies,
    repeats: bool = True,
) -> Copies:
    """:func:`observe` each cast among the copies of an operand; in eager code, in one call."""
    lows: dict[tuple[Gemm, ...], Quantized] = {}
    for quantized in made:
        low = quantized
        if low.qdata.shape != high.shape:  # a transposed copy may have more rows, of zeros
            rows = math.prod(high.shape[:-1])
            low = low._replace(qdata=low.qdata[:rows].view(high.shape))
        lows.setdefault(owner.gemms_of(operand, quantized.scheme), low)
    if not torch.compiler.is_compiling():
        _show(owner, operand, high, lows, repeats)
        return made
    shown: dict[Scheme, torch.Tensor] = {}
    for gemms, low in lows.items():
        shown[low.scheme] = observe(owner, operand, gemms, high, low, repeats)
    return [each._replace(scales=(shown[each.scheme], *each.scales[1:])) for each in made]


def _show(owner: Owner, operand: Operand, high: torch.Tensor, lows: Casts, repeats: bool) -> None:
    new: dict[Observer, dict[tuple[Gemm, ...], Quantized]] = {}
    for gemms, low in lows.items():
        for observer in _observers_of((owner, operand, gemms), high, repeats):
            new.setdefault(observer, {})[gemms] = low
    for observer, casts in new.items():
        _tell(observer.on_casts, owner, operand, high, casts)


def _observers_of(what: Hashable, seen: torch.Tensor, repeats: bool = True) -> list[Observer]:
    """The observers to show a cast of the tensor ``seen`` to.

    If the cast ``repeats``, a backward shows it only to observers that have not seen it: compiled
    code may move a cast of the forward to the backward, where it is used.
    """
    if isinstance(seen, STAND_INS):
        return []
    if not repeats:
        return list(_observers)
    if in_backward():
        return [observer for observer, shown in _observers.items() if what not in shown.casts]
    for shown in _observers.values():
        shown.casts.add(what)
    return list(_observers)


@query(
    "observe_cast(Tensor used, Tensor handle, str operand, str[] gemms, Tensor high, "
    "Tensor qdata, Tensor[] scales, str scheme, int[] start, bool repeats) -> (Tensor, Tensor)"
)
def observe_cast(
    used: torch.Tensor,
    handle: torch.Tensor,
    operand: Operand,
    gemms: list[Gemm],
    high: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operator of :func:`observe` and, without ``gemms``, of :func:`observe_prepared_cast`.

    Returns ``used``, and the number of a prepared cast.
    """
    *cast, repeats = rest
    low = operand_of(*cast)
    if not gemms:
        return used.clone(), _show_preparation(owner_of(handle), high, low)
    _show(owner_of(handle), operand, high, {tuple(gemms): low}, repeats)
    return used.clone(), torch.zeros((), dtype=torch.int64, device="cpu")


observe_cast.register_fake(
    lambda used, *_: (torch.empty_like(used), torch.empty((), dtype=torch.int64, device="cpu"))
)


def observe_prepared_cast(owner: Owner, input: torch.Tensor, low: Quantized) -> torch.Tensor:
    """Show observers the cast of an input that is prepared by the config of ``owner``.

    Returns:
        The Float8Tensor of ``low``, or a DTensor of it, with the number of this cast.
    """
    high = local_tensor(input).detach()
    if torch.compiler.is_compiling():
        by = owner.handle, "input"
        first, number = observe_cast.overload(low.scales[0], *by, [], high, *flat(low), True)
        low = low._replace(scales=(first, *low.scales[1:]))
    else:
        number = _show_preparation(owner, high, low)
        if are_gemms_observed():
            _prepared[number] = input.detach()
    prepared = Float8Tensor.of(low, input.dtype).rewrap(cast_number=number)
    return with_local(input, prepared)


def observe_prepared_use(owner: Owner, prepared: Float8Tensor) -> Float8Tensor:
    """Show observers that a layer takes a prepared input, and return the input to use."""
    number = prepared.cast_number
    if number is None:  # its cast was not observed
        return prepared
    if torch.compiler.is_compiling():
        scale = observe_use.overload(prepared.scale, owner.handle, number)
        return prepared.rewrap(scale=(scale, *scales_of(prepared)[1:]))
    _show_use(owner, number)
    return prepared


def _show_preparation(owner: Owner, high: torch.Tensor, low: Quantized) -> torch.Tensor:
    """Show the cast of a prepared input, and return its number as a new tensor."""
    value = next(_cast_numbers)
    with without_dispatch_modes(), torch.inference_mode(False):
        number = torch.tensor(value, device="cpu")
    for observer in _observers_of((owner, "prepared input"), high):
        _observers[observer].kept[value] = _tell(observer.on_prepared_cast, owner, high, low)
    return number


def _show_use(owner: Owner, number: torch.Tensor) -> None:
    for observer in _observers_of((owner, "use"), number):
        kept = _observers[observer].kept.get(int(number.item()))
        _tell(observer.on_prepared_use, owner, kept)


@query("observe_use(Tensor scale, Tensor handle, Tensor number) -> Tensor")
def observe_use(scale: torch.Tensor, handle: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Operator of :func:`observe_prepared_use`."""
    _show_use(owner_of(handle), number)
    return scale.clone()


observe_use.register_fake(lambda scale, *_: torch.empty_like(scale))


def high_precision(
    owner: Owner, input: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The input and the weight of a forward before casts and moves; None if not known."""
    local, high = local_tensor(input), None
    if not isinstance(local, Float8Tensor):
        high = input.detach()
    elif local.cast_number is not None:
        high = _prepared.get(local.cast_number)
    return high, owner.high_precision(weight)


def observe_gemm(
    owner: Owner,
    gemm: Gemm,
    left: torch.Tensor | None,
    right: torch.Tensor | None,
    result: torch.Tensor | None,
) -> None:
    """Show observers a GEMM, unless an operand is unknown or the GEMM is of a repeated forward."""
    if left is None or right is None or result is None or (gemm == "output" and in_backward()):
        return
    for observer in [each for each, shown in _observers.items() if shown.gemms]:
        _tell(observer.on_gemm, owner, gemm, left, right, result)


class GemmRecord(NamedTuple):
    """One float8 GEMM of a layer: ``a @ b``, with local copies of the operands."""

    fqn: str  # the layer's name; empty in a compiled graph
    gemm: Gemm
    a: Float8Tensor  # [M, K]
    b: Float8Tensor  # [K, N]
    options: GemmOptions


@contextmanager
def record_gemms() -> Iterator[list[GemmRecord]]:
    """Record the operands of every float8 GEMM that a layer runs inside the block.

    Yields:
        A list that grows by one :class:`GemmRecord` per GEMM, in the order in which they run. GEMMs
        in compiled graphs and in high precision are not recorded.

    Collectives: none.
    """
    records: list[GemmRecord] = []
    _recordings[id(records)] = records
    try:
        yield records
    finally:
        del _recordings[id(records)]


def note_gemm(
    fqn: str,
    gemm: Gemm,
    left: Quantized,
    right: Quantized,
    turn: tuple[bool, bool],
    out_dtype: torch.dtype,
    options: GemmOptions,
) -> None:
    """Add a GEMM to the active recordings; arguments as in :func:`fp8_dist.scaling.multiply`."""
    if not _recordings:
        return
    operands = matrices(left, right, turn)
    copies: list[Any] = [Float8Tensor.of(each, out_dtype).clone() for each in operands]
    # FSDP2 frees the scales that it gathers with stored weights, and copies share 0-dim scales.
    a, b = (each.rewrap(scale=tuple([s.clone() for s in each.scales])) for each in copies)
    for records in _recordings.values():
        records.append(GemmRecord(fqn, gemm, a, b, options))  # type: ignore[arg-type]
