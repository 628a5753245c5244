"""Observers of the casts and GEMMs of layers, for statistics, recordings and tests.

Without an observer a cast costs one check of a Python variable, and no operator. With an observer
all code runs eagerly, so that compiled code needs neither operators nor guards for observers.

An input that ``PrepareFloat8ModuleInput`` casts for several layers is *prepared*. Each of these
layers shows its cast when it takes the input, perhaps after a gather. Therefore the Float8Tensor
carries what was cast, its :class:`Origin`.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from fp8_dist.cast import Copies
from fp8_dist.config import Float8LinearConfig
from fp8_dist.kernels import Groups
from fp8_dist.mesh import Layout, local_tensor
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import Quantized, Scheme
from fp8_dist.tensor import Float8Tensor
from fp8_dist.torch_internals import (
    STAND_INS,
    constant_in_graphs,
    has_dispatch_modes,
    in_backward,
    innermost,
    without_dispatch_modes,
)

# The float8 copies of an operand, by the GEMMs that take each.
Casts = Mapping[tuple[Gemm, ...], Quantized]


class Owner(Protocol):
    """The owner of a cast operand: a layer's ``float8_weight``."""

    fqn: str
    config: Float8LinearConfig

    def high_precision(self, weight: torch.Tensor) -> torch.Tensor:
        """The high-precision parameter of a forward's weight, detached: plain or a DTensor."""

    def forward_layout(self, weight: torch.Tensor) -> Layout | None:
        """The layout of a forward's weight, also over the ranks that FSDP2 gathers it on."""

    def casts_of(self, operand: Operand) -> dict[tuple[Gemm, ...], Scheme]:
        """The schemes of the casts of an operand, by the GEMMs that take each."""


class Dispatch(NamedTuple):
    """The experts that the rows of a cast are sent to.

    Attributes:
        experts: int64 ``[R, k]``, the experts of each row; other numbers are no experts.
        ranks: those that have equal numbers of experts each, in the order of the experts.
    """

    experts: torch.Tensor
    ranks: list[int]


class Source(NamedTuple):
    """The local tensor that a cast reads.

    Attributes:
        high: ``[..., K]``, in high precision.
        layout: the layout of the operand of which ``high`` is this rank's part; ``None`` if it is
            all of it.
        folds: fp32, broadcasts to ``high``: the scales of another operand that multiply it before
            the cast, as in the recipe ``rowwise_folded``; ``None`` if there are none.
        dispatch: where the rows are sent; ``None`` if they stay.
    """

    high: torch.Tensor
    layout: Layout | None = None
    folds: torch.Tensor | None = None
    dispatch: Dispatch | None = None

    def product(self) -> torch.Tensor:
        """``high``, times the scales that are folded into it."""
        return self.high if self.folds is None else self.high.to(torch.float32) * self.folds


class Product(NamedTuple):
    """A float8 GEMM of local operands ``[..., K]``, see :data:`fp8_dist.recipe.GEMM_OPERANDS`.

    Attributes:
        gemm, left, right, result: the GEMM, its operands and its result.
        options: the other arguments of the function that multiplies.
        layouts: the layouts of the operands; ``None`` for one that is whole.
        groups: the rows of each expert in a grouped GEMM, whose scales are not folded yet;
            ``None`` for a linear layer.
    """

    gemm: Gemm
    left: Quantized
    right: Quantized
    result: torch.Tensor
    options: tuple[Any, ...]
    layouts: tuple[Layout | None, Layout | None] = (None, None)
    groups: Groups | None = None


class Observer:
    """Base class of observers of casts and GEMMs.

    A subclass overrides methods, which must not change the tensors that they are given. They are
    called without gradients and outside dispatch modes.
    """

    def on_casts(self, owner: Owner, operand: Operand, source: Source, lows: Casts) -> None:
        """Called when a local operand was cast for GEMMs, or when a layer takes a prepared input.

        ``lows`` are float8 copies of the shape of the source, by the GEMMs that take them.
        """

    def takes_products_of(self, owner: Owner) -> bool:
        """Whether :meth:`on_multiply` is called for a layer."""
        return True

    def on_multiply(self, owner: Owner, product: Product) -> None:
        """Called after a layer multiplied two local float8 operands."""

    def on_gemm(
        self,
        owner: Owner,
        gemm: Gemm,
        left: torch.Tensor,
        right: torch.Tensor,
        result: torch.Tensor,
    ) -> None:
        """Called after a GEMM of a layer, if ``observed_by`` was called with ``gemms``.

        ``left`` is the input or grad_output, ``[..., K]``. ``right`` is the weight, or the input
        for grad_weight. Both are in high precision, as they were before casts and moves. ``result``
        is the result of the float8 GEMM. The layer is on no mesh: all of them are plain tensors.
        """


class Origin(NamedTuple):
    """The tensor that a prepared input was cast from, with its local float8 copy."""

    high: torch.Tensor  # plain or a DTensor, detached
    low: Quantized


class _Block(NamedTuple):
    """A block in which an observer is shown casts."""

    gemms: bool  # whether it is shown GEMMs with their operands in high precision
    in_forward: set[Hashable]  # the casts that it was shown in a forward


_observers: dict[Observer, _Block] = {}
_eager = ExitStack()  # of the stance while there is an observer


@constant_in_graphs
def is_observed() -> bool:
    """Whether there is an observer; always False in a graph, which therefore needs no guard.

    Graphs are traced only while there is no observer (see :func:`observed_by`), except by
    ``torch.export``.
    """
    return bool(_observers) and not torch.compiler.is_compiling()


def are_gemms_observed() -> bool:
    """Whether an observer is shown GEMMs with their operands in high precision."""
    return is_observed() and any(block.gemms for block in _observers.values())


@contextmanager
def observed_by(observer: Observer, gemms: bool = False) -> Iterator[None]:
    """Show an observer the casts of all layers inside the block, and run all code eagerly.

    With ``gemms``, operands are kept in high precision, and ``on_gemm`` is called too.
    """
    if not _observers:  # the blocks of observers may overlap without being nested
        _eager.enter_context(torch.compiler.set_stance("force_eager"))
    _observers[observer] = _Block(gemms, set())
    try:
        yield
    finally:
        del _observers[observer]
        if not _observers:
            _eager.close()


def _tell(method: Callable[..., None], *arguments: Any) -> None:
    """Call a method of an observer without gradients, outside dispatch modes."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled() or has_dispatch_modes():
        with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
            method(*arguments)
    else:  # in an autograd function; contexts take time
        method(*arguments)


def observe(
    owner: Owner, operand: Operand, source: Source, made: Copies, repeats: bool = True
) -> None:
    """Show observers the cast of an operand.

    Args:
        repeats: whether a backward may repeat the cast (activation checkpointing, FSDP2's second
            gather). A backward shows such a cast only if no forward did: without gradients, a
            forward does not make the casts that only the backward takes.
    """
    gemms_of = {scheme: gemms for gemms, scheme in owner.casts_of(operand).items()}
    shape = source.high.shape
    lows: dict[tuple[Gemm, ...], Quantized] = {}
    for low in made:
        if low.qdata.shape != shape:  # a transposed copy may have more rows, of zeros
            low = low._replace(qdata=low.qdata[: math.prod(shape[:-1])].view(shape))
        lows.setdefault(gemms_of[low.scheme], low)
    _show(owner, operand, source, lows, repeats)


def observe_prepared(owner: Owner, prepared: Float8Tensor) -> None:
    """Show observers the cast of a prepared input that a layer takes."""
    if prepared.origin is not None:  # else the cast was not observed
        high, low = prepared.origin
        (gemms,) = owner.casts_of("input")
        source = Source(local_tensor(high), Layout.of(high))
        _show(owner, "input", source, {gemms: low}, repeats=True)


def _show(owner: Owner, operand: Operand, source: Source, lows: Casts, repeats: bool) -> None:
    if isinstance(source.high, STAND_INS):
        return
    source = source._replace(high=innermost(source.high))
    for observer, block in [*_observers.items()]:
        new = lows
        if repeats and in_backward():
            known = block.in_forward
            new = {
                gemms: low for gemms, low in lows.items() if (owner, operand, gemms) not in known
            }
        elif repeats:
            block.in_forward.update((owner, operand, gemms) for gemms in lows)
        if new:
            _tell(observer.on_casts, owner, operand, source, new)


def observe_multiply(owner: Owner, product: Product) -> None:
    """Show observers a float8 GEMM."""
    if isinstance(product.result, STAND_INS):
        return
    for observer in [observer for observer in _observers if observer.takes_products_of(owner)]:
        _tell(observer.on_multiply, owner, product)


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
    for observer in [observer for observer, block in _observers.items() if block.gemms]:
        _tell(observer.on_gemm, owner, gemm, left, right, result)
