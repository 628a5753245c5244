"""What layers cast, shown to observers while it happens: statistics, captures.

Without an observer a cast costs one look at a Python list, and no operator. In compiled code the
operators are in the graph only while an observer is there: the graphs with and without them are
kept, so that code compiles once more when it is first observed, and never again.
"""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from fp8_dist.cast import Copies
from fp8_dist.config import CastSpec, Float8LinearConfig, Gemm, Operand
from fp8_dist.granularity import COLUMN, granularity_named
from fp8_dist.linear.scale_query import owner_of, query
from fp8_dist.mesh import local_tensor
from fp8_dist.tensor import Float8Tensor, Quantized
from fp8_dist.torch_internals import STAND_INS, in_backward, without_dispatch_modes

# In the place of the GEMMs of an input that PrepareFloat8ModuleInput casts for several layers.
PREPARED: tuple[Gemm, ...] = ()


class Owner(Protocol):
    """Whose operands are cast: a layer's ``float8_weight``.

    Attributes:
        fqn: the layer's name.
        config: the layer's.
        handle: names it in operators (``scale_query``).
    """

    fqn: str
    config: Float8LinearConfig
    handle: torch.Tensor

    def high_precision(self, weight: torch.Tensor) -> torch.Tensor:
        """What a forward's weight was made of: a plain tensor or DTensor, detached."""


class CastObserver(Protocol):
    """Is shown every cast while it observes. It must not change what it is shown.

    It is called without gradients and outside of dispatch modes.
    """

    def on_casts(
        self,
        owner: Owner,
        operand: Operand,
        high: torch.Tensor,
        lows: Mapping[tuple[Gemm, ...], Quantized],
    ) -> None:
        """A local operand was cast, for GEMMs.

        ``high``: ``[..., K]`` in high precision; ``lows``: float8 copies of the same shape, by the
        GEMMs that take them. In eager code all copies of a cast operand are shown at once. The key
        is :data:`PREPARED` for an input that :meth:`on_prepared` tells the users of.
        """

    def on_prepared(self, owner: Owner, features: int) -> None:
        """A layer takes an input of so many features, as it was last prepared."""


class GemmObserver(Protocol):
    """Is shown the float8 GEMMs of eager code while it observes, as :class:`CastObserver`."""

    def on_gemm(
        self,
        owner: Owner,
        gemm: Gemm,
        left: torch.Tensor,
        right: torch.Tensor,
        result: torch.Tensor,
    ) -> None:
        """A layer has multiplied.

        ``left``: the input or grad_output, ``[..., K]``, ``right``: the weight, or the input for
        grad_weight; both in high precision, as they were before casts and moves. ``result``: what
        float8 gave for them. All of them are plain tensors, or DTensors of any placements. All
        ranks of their meshes get the same calls, so it may communicate.
        """


# Each with what it was shown outside of a backward.
_observers: dict[CastObserver, set[Hashable]] = {}
_gemm_observers: list[GemmObserver] = []
_is_observed = False  # what graphs are guarded by: the list's items would be, too
# Inputs in high precision as they were last prepared, by their features.
_prepared: dict[int, torch.Tensor] = {}


def is_observed() -> bool:
    """Whether anybody observes."""
    return _is_observed


@contextmanager
def observed_by(observer: CastObserver) -> Iterator[None]:
    """Show an observer the casts of all layers inside the block."""
    global _is_observed
    _observers[observer] = set()
    _is_observed = True
    try:
        yield
    finally:
        del _observers[observer]
        _is_observed = bool(_observers)


@contextmanager
def gemms_observed_by(observer: GemmObserver) -> Iterator[None]:
    """Show an observer the GEMMs of all layers inside the block, in which all code is eager."""
    _gemm_observers.append(observer)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _gemm_observers[:] = [kept for kept in _gemm_observers if kept is not observer]
        if not _gemm_observers:
            _prepared.clear()


def are_gemms_observed() -> bool:
    """Whether anybody observes GEMMs."""
    return bool(_gemm_observers) and not torch.compiler.is_compiling()


def note_prepared(input: torch.Tensor) -> None:
    """Keep an input in high precision that layers will take prepared, for :func:`high_input`."""
    _prepared[input.shape[-1]] = input.detach()


class HighPrecision(NamedTuple):
    """The operands of a forward before casts and moves; what is not known is None."""

    input: torch.Tensor | None = None
    weight: torch.Tensor | None = None


def high_precision(owner: Owner, input: torch.Tensor, weight: torch.Tensor) -> HighPrecision:
    """The operands of a forward, whose input may be prepared and whose weight gathered."""
    prepared = isinstance(local_tensor(input), Float8Tensor)
    high = _prepared.get(input.shape[-1]) if prepared else input.detach()
    return HighPrecision(high, owner.high_precision(weight))


def observe_gemm(
    owner: Owner,
    gemm: Gemm,
    left: torch.Tensor | None,
    right: torch.Tensor | None,
    result: torch.Tensor | None,
) -> None:
    """Show observers a GEMM whose operands are known, but not that of a repeated forward.

    Arguments as :meth:`GemmObserver.on_gemm`.
    """
    if left is None or right is None or result is None or (gemm == "output" and in_backward()):
        return
    with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        for observer in list(_gemm_observers):
            observer.on_gemm(owner, gemm, left, right, result)


def casts_of(config: Float8LinearConfig, operand: Operand) -> dict[tuple[Gemm, ...], CastSpec]:
    """The casts of an operand as observers are shown them, by the GEMMs that take them."""
    if config.fold_row_scales and operand == "grad_output":
        # The scales of another operand are folded into each. That of grad_weight keeps columns.
        uses = config.uses(operand).items()
        return {
            (gemm,): cast if gemm == "grad_input" else cast._replace(granularity=COLUMN)
            for gemm, cast in uses
            if cast is not None
        }
    return {_gemms_of(config, operand, cast): cast for cast in config.casts(operand)}


def _gemms_of(config: Float8LinearConfig, operand: Operand, cast: CastSpec) -> tuple[Gemm, ...]:
    # (A list: dynamo takes no generator.)
    return tuple([gemm for gemm, each in config.uses(operand).items() if each == cast])


def observe(
    owner: Owner,
    operand: Operand,
    gemms: tuple[Gemm, ...],
    high: torch.Tensor,
    low: Quantized,
    repeats: bool,
    carrier: torch.Tensor | None = None,
) -> torch.Tensor:
    """Show observers a cast.

    Args:
        owner: the layer's ``float8_weight``.
        operand, gemms, high, low: as :meth:`CastObserver.on_casts` takes them.
        repeats: a backward may repeat the cast (activation checkpointing, FSDP2's second gather).
            It is shown once.
        carrier: what the layer goes on with; None: the scale of ``low``.

    Returns:
        What must be used in the place of the carrier: a graph would drop the operator otherwise.
    """
    carrier = low.scale if carrier is None else carrier
    if not torch.compiler.is_compiling():
        _show(owner, operand, high, {gemms: low}, repeats)
        return carrier
    qdata, scale, granularity = low
    return observe_cast.overload(
        carrier,
        owner.handle,
        operand,
        list(gemms),
        high.detach(),
        qdata,
        scale,
        granularity.name,
        repeats,
    )


def observe_copies(
    owner: Owner,
    operand: Operand,
    high: torch.Tensor,
    made: Copies,
    repeats: bool = True,
) -> Copies:
    """:func:`observe` the copies of an operand, each cast once; in eager code all at once."""
    if not torch.compiler.is_compiling():
        lows: dict[tuple[Gemm, ...], Quantized] = {}
        for copy, quantized in made.items():
            lows.setdefault(_gemms_of(owner.config, operand, copy.cast), quantized)
        _show(owner, operand, high, lows, repeats)
        return made
    found: Copies = {}
    scales = {}
    for copy, quantized in made.items():
        if copy.cast not in scales:
            gemms = _gemms_of(owner.config, operand, copy.cast)
            scales[copy.cast] = observe(owner, operand, gemms, high, quantized, repeats)
        found[copy] = quantized._replace(scale=scales[copy.cast])
    return found


def observe_prepared(owner: Owner, features: int, scale: torch.Tensor) -> torch.Tensor:
    """Tell observers that a layer takes a prepared input; returns the scale to go on with."""
    if torch.compiler.is_compiling():
        return take_prepared.overload(scale, owner.handle, features)
    _show_prepared(owner, features)
    return scale


def _show(
    owner: Owner,
    operand: Operand,
    high: torch.Tensor,
    lows: Mapping[tuple[Gemm, ...], Quantized],
    repeats: bool,
) -> None:
    if isinstance(high, STAND_INS):
        return
    new: dict[CastObserver, dict[tuple[Gemm, ...], Quantized]] = {}
    for gemms, low in lows.items():
        for observer in _who_has_not_seen((owner, operand, gemms), repeats):
            new.setdefault(observer, {})[gemms] = low
    for observer, casts in new.items():
        with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
            observer.on_casts(owner, operand, high, casts)


def _show_prepared(owner: Owner, features: int) -> None:
    for observer in _who_has_not_seen((owner, features), True):
        with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
            observer.on_prepared(owner, features)


def _who_has_not_seen(what: Hashable, repeats: bool) -> list[CastObserver]:
    """The observers to show something: in a backward only what they were not shown before.

    (Compiled code may leave a cast of the forward to the backward, where it is used.)
    """
    if not repeats:
        return list(_observers)
    if in_backward():
        return [observer for observer, seen in _observers.items() if what not in seen]
    for seen in _observers.values():
        seen.add(what)
    return list(_observers)


@query(
    "observe_cast(Tensor carrier, Tensor handle, str operand, str[] gemms, Tensor high, "
    "Tensor qdata, Tensor scale, str granularity, bool repeats) -> Tensor"
)
def observe_cast(
    carrier: torch.Tensor,
    handle: torch.Tensor,
    operand: Operand,
    gemms: list[Gemm],
    high: torch.Tensor,
    qdata: torch.Tensor,
    scale: torch.Tensor,
    granularity: str,
    repeats: bool,
) -> torch.Tensor:
    """:func:`observe` in a graph."""
    low = Quantized(qdata, scale, granularity_named(granularity))
    _show(owner_of(handle), operand, high, {tuple(gemms): low}, repeats)
    return carrier.clone()


@query("take_prepared(Tensor scale, Tensor handle, int features) -> Tensor")
def take_prepared(scale: torch.Tensor, handle: torch.Tensor, features: int) -> torch.Tensor:
    """:func:`observe_prepared` in a graph."""
    _show_prepared(owner_of(handle), features)
    return scale.clone()


observe_cast.register_fake(lambda carrier, *_: torch.empty_like(carrier))
take_prepared.register_fake(lambda scale, *_: torch.empty_like(scale))
