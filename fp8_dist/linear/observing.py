"""Observers of the casts of layers, for statistics and captures.

Without an observer a cast costs one check of a Python variable, and no operator. In compiled code
the operators are in the graph only while there is an observer. The graphs with and without them are
both kept, so code compiles once more when it is first observed, and never again.
"""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from fp8_dist.cast import Copies
from fp8_dist.config import Float8LinearConfig, Gemm, Operand
from fp8_dist.linear.scale_query import owner_of, query
from fp8_dist.scaling import Dense, Quantized, Scheme, Start, scheme_named
from fp8_dist.torch_internals import STAND_INS, in_backward, without_dispatch_modes


class Owner(Protocol):
    """The owner of a cast operand: a layer's ``float8_weight``.

    Attributes:
        fqn: the layer's name.
        config: the layer's config.
        handle: identifies the owner in operators (``scale_query``).
    """

    fqn: str
    config: Float8LinearConfig
    handle: torch.Tensor

    def high_precision(self, weight: torch.Tensor) -> torch.Tensor:
        """The high-precision parameter behind a forward's weight, detached: plain or a DTensor."""


class CastObserver(Protocol):
    """An observer of every cast. It must not change the tensors that it is given.

    Its methods are called without gradients and outside of dispatch modes.
    """

    def on_casts(
        self,
        owner: Owner,
        operand: Operand,
        high: torch.Tensor,
        lows: Mapping[tuple[Gemm, ...], Quantized],
    ) -> None:
        """Called when a local operand was cast for GEMMs.

        ``high`` is ``[..., K]`` in high precision. ``lows`` are float8 copies of the same shape, by
        the GEMMs that take them. In eager code one call has all copies of a cast operand.
        """

    def on_prepared_cast(
        self, owner: Owner, number: int, high: torch.Tensor, low: Quantized
    ) -> None:
        """Called when ``PrepareFloat8ModuleInput`` cast a local input by the config of ``owner``.

        ``number`` identifies the cast in this process, for :meth:`on_prepared_use`.
        """

    def on_prepared_use(self, owner: Owner, number: int) -> None:
        """Called when a layer takes the input of the cast ``number``, perhaps gathered since."""


# Observers, each with the casts that it was shown outside of a backward.
_observers: dict[CastObserver, set[Hashable]] = {}
_is_observed = False  # guards of graphs: with the dict they would be guarded by its items, too


def is_observed() -> bool:
    """Whether there is an observer of casts."""
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


def casts_of(config: Float8LinearConfig, operand: Operand) -> dict[tuple[Gemm, ...], Scheme]:
    """The schemes of the casts of an operand that observers are shown, by the GEMMs of each."""
    recipe = config.recipe
    if recipe.folds and operand == "grad_output":
        # Each cast has the scales of another operand folded in. The one of grad_weight has one
        # scale per column.
        uses = recipe.uses[operand].items()
        return {
            (gemm,): scheme if gemm == "grad_input" else Dense(scheme.dtype, "column", True)
            for gemm, scheme in uses
            if scheme is not None
        }
    return {_gemms_of(config, operand, each): each for each in recipe.schemes[operand]}


def _gemms_of(config: Float8LinearConfig, operand: Operand, scheme: Scheme) -> tuple[Gemm, ...]:
    # A list, because dynamo supports no generator here.
    return tuple([gemm for gemm, each in config.recipe.uses[operand].items() if each == scheme])


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
        operand, gemms, high, low: as for :meth:`CastObserver.on_casts`.
        repeats: a backward may repeat the cast (activation checkpointing, FSDP2's second gather).
            It is shown once.
        carrier: a tensor that the layer uses afterwards; None: the first scale of ``low``.

    Returns:
        The tensor to use in place of the carrier. A graph would drop the operator otherwise.
    """
    carrier = low.scales[0] if carrier is None else carrier
    if not torch.compiler.is_compiling():
        _show(owner, operand, high, {gemms: low}, repeats)
        return carrier
    of, (qdata, scales, scheme, start, _) = (operand, list(gemms), high.detach()), low
    return observe_cast.overload(
        carrier, owner.handle, *of, qdata, list(scales), scheme.key, start, repeats
    )


def observe_copies(
    owner: Owner,
    operand: Operand,
    high: torch.Tensor,
    made: Copies,
    repeats: bool = True,
) -> Copies:
    """:func:`observe` for copies of an operand, once per cast; in eager code in one call."""
    if not torch.compiler.is_compiling():
        lows: dict[tuple[Gemm, ...], Quantized] = {}
        for copy, quantized in made.items():
            lows.setdefault(_gemms_of(owner.config, operand, copy.scheme), quantized)
        _show(owner, operand, high, lows, repeats)
        return made
    found: Copies = {}
    shown: dict[Scheme, torch.Tensor] = {}
    for copy, quantized in made.items():
        if copy.scheme not in shown:
            gemms = _gemms_of(owner.config, operand, copy.scheme)
            shown[copy.scheme] = observe(owner, operand, gemms, high, quantized, repeats)
        scales = (shown[copy.scheme], *quantized.scales[1:])
        found[copy] = quantized._replace(scales=scales)
    return found


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
        for observer in who_has_not_seen((owner, operand, gemms), repeats):
            new.setdefault(observer, {})[gemms] = low
    for observer, casts in new.items():
        with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
            observer.on_casts(owner, operand, high, casts)


def who_has_not_seen(what: Hashable, repeats: bool) -> list[CastObserver]:
    """The observers to show a cast. If it ``repeats``, a backward shows it only to new ones.

    Compiled code may move a cast of the forward to the backward, where it is used.
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
    "Tensor qdata, Tensor[] scales, str scheme, int[] start, bool repeats) -> Tensor"
)
def observe_cast(
    carrier: torch.Tensor,
    handle: torch.Tensor,
    operand: Operand,
    gemms: list[Gemm],
    high: torch.Tensor,
    qdata: torch.Tensor,
    scales: list[torch.Tensor],
    scheme: str,
    start: Start,
    repeats: bool,
) -> torch.Tensor:
    """:func:`observe` in a compiled graph."""
    low = Quantized(qdata, tuple(scales), scheme_named(scheme), (start[0], start[1]))
    _show(owner_of(handle), operand, high, {tuple(gemms): low}, repeats)
    return carrier.clone()


observe_cast.register_fake(lambda carrier, *_: torch.empty_like(carrier))
