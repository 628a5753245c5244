"""Observers of the casts and GEMMs of layers, for statistics, recordings and tests.

Without an observer, a cast only checks a Python variable. While there is an observer, all code runs
eagerly, so compiled code needs neither operators nor guards for observers.

An input that ``PrepareFloat8ModuleInput`` casts for several layers is *prepared*. Each of these
layers reports the cast when it takes the input, perhaps after a gather. For this, the Float8Tensor
has an ``origin``: the :class:`Original` and its float8 copy.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from fp8_dist import torch_internals as internals
from fp8_dist.config import Float8LinearConfig
from fp8_dist.kernels.grouped import Groups
from fp8_dist.mesh import Layout
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import Quantized, Scheme
from fp8_dist.scaling.operators import unpack
from fp8_dist.tensor import Float8Tensor

# The float8 copies of an operand, by the GEMMs that take each.
Casts = Mapping[tuple[Gemm, ...], Quantized]


class Owner(Protocol):
    """The owner of a cast operand: a layer's ``float8_weight``."""

    fqn: str
    config: Float8LinearConfig

    def high_precision(self, weight: torch.Tensor) -> torch.Tensor:
        """The parameter of the weight that a forward uses, in high precision and detached."""

    def forward_layout(self, weight: torch.Tensor) -> Layout | None:
        """The layout of the weight that a forward uses, also over the ranks of FSDP2's gather."""

    def casts_of(self, operand: Operand) -> dict[tuple[Gemm, ...], Scheme]:
        """The schemes of the casts of an operand, by the GEMMs that take each."""


class Dispatch(NamedTuple):
    """The experts that the rows of a cast are sent to.

    Attributes:
        experts: int64 ``[R, k]``, the experts of each row. Other numbers stand for no expert.
        ranks: the ranks that hold the experts, equally many each, in the order of the experts.
    """

    experts: torch.Tensor
    ranks: list[int]


class Original(NamedTuple):
    """The local tensor that a cast reads.

    Attributes:
        high: ``[..., K]``, in high precision.
        layout: the layout of the operand whose local part is ``high``; ``None`` if ``high`` is the
            whole operand.
        folds: fp32, broadcasts to ``high``: the scales of another operand by which ``high`` is
            multiplied before the cast (recipe ``rowwise_folded``); ``None`` if there are none.
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
        options: the other arguments of the function that computes the GEMM.
        layouts: the layouts of the operands; ``None`` for an operand that is not distributed.
        groups: the rows of each expert in a grouped GEMM, in which scales are not folded yet;
            ``None`` for a linear layer.
        high_left, high_right: the operands in high precision, as they were before casts and moves;
            ``None`` unless an observer was registered with ``gemms``. They are plain tensors: no
            mesh is supported.
    """

    gemm: Gemm
    left: Quantized
    right: Quantized
    result: torch.Tensor
    options: tuple[Any, ...]
    layouts: tuple[Layout | None, Layout | None] = (None, None)
    groups: Groups | None = None
    high_left: torch.Tensor | None = None
    high_right: torch.Tensor | None = None


class Use(NamedTuple):
    """The operand that a cast makes, as observers are told.

    Attributes:
        owners: the owners of the operand; several if layers share it.
        operand: its name.
        layout: its layout, if that is not the layout of the cast.
        dispatch: see :class:`Original`.
    """

    owners: Sequence[Owner]
    operand: Operand
    layout: Layout | None = None
    dispatch: Dispatch | None = None


class Observer:
    """Base class of observers of casts and GEMMs.

    A subclass overrides methods, which must not change the tensors that they are given. They are
    called without gradients and outside dispatch modes.
    """

    def on_casts(self, owner: Owner, operand: Operand, original: Original, lows: Casts) -> None:
        """Called after a local operand was cast, or when a layer takes a prepared input.

        ``lows`` maps the GEMMs that take each float8 copy to the copy, of the original's shape.
        """

    def on_multiply(self, owner: Owner, product: Product) -> None:
        """Called after a layer multiplied two local float8 operands."""


class _Registration(NamedTuple):
    """The registration of an observer for the body of a ``with`` statement."""

    gemms: bool  # whether products have their operands in high precision
    in_forward: set[Hashable]  # the casts that were reported to the observer in a forward


_observers: dict[Observer, _Registration] = {}
_eager = ExitStack()  # holds the stance "force_eager" while there is an observer


@internals.constant_in_graphs
def is_observed() -> bool:
    """Whether an observer is registered; always False in a graph, which needs no guard for it.

    Graphs are traced only while there is no observer (see :func:`observed_by`), except by
    ``torch.export``.
    """
    return bool(_observers) and not torch.compiler.is_compiling()


def keeps_operands() -> bool:
    """Whether observers are notified of GEMMs with their operands in high precision."""
    return is_observed() and any(block.gemms for block in _observers.values())


@contextmanager
def observed_by(observer: Observer, gemms: bool = False) -> Iterator[None]:
    """Register an observer of the casts of all layers inside the block, which runs eagerly.

    With ``gemms``, operands are kept in high precision (:attr:`Product.high_left`).
    """
    if not _observers:  # the blocks of observers may overlap without being nested
        _eager.enter_context(torch.compiler.set_stance("force_eager"))
    _observers[observer] = _Registration(gemms, set())
    try:
        yield
    finally:
        del _observers[observer]
        if not _observers:
            _eager.close()


def _notify(method: Callable[..., None], *arguments: Any) -> None:
    """Call an observer's method without gradients, outside dispatch modes."""
    in_mode = torch.is_inference_mode_enabled() or internals.has_dispatch_modes()
    if torch.is_grad_enabled() or in_mode:
        with internals.without_dispatch_modes(), internals.normal_tensors():
            method(*arguments)
    else:  # in an autograd function, where entering these contexts would only cost time
        method(*arguments)


def notify_cast(
    use: Use,
    high: torch.Tensor,
    layout: Layout | None,
    copies: Sequence[Quantized],
    folds: torch.Tensor | None = None,
) -> None:
    """Notify observers of the cast of an operand; see :class:`Original`."""
    if not (is_observed() and copies[0].scheme.levels):  # without levels, it is in high precision
        return
    original = Original(high, use.layout or layout, folds, use.dispatch)
    shape = high.shape
    for owner in use.owners:
        gemms_of = {scheme: gemms for gemms, scheme in owner.casts_of(use.operand).items()}
        lows: dict[tuple[Gemm, ...], Quantized] = {}
        for low in copies:
            if low.qdata.dtype is not low.scheme.dtype:
                low = low._replace(qdata=unpack(low.qdata, low.scheme))
            if low.qdata.shape != shape:  # a transposed copy may have more rows, of zeros
                low = low._replace(qdata=low.qdata[: math.prod(shape[:-1])].view(shape))
            lows.setdefault(gemms_of[low.scheme], low)
        _report(owner, use.operand, original, lows)


def notify_prepared(owner: Owner, prepared: Float8Tensor) -> None:
    """Notify observers of the cast of a prepared input that a layer takes."""
    if prepared.origin is not None:  # else the cast was not observed
        original, low = prepared.origin
        (gemms,) = owner.casts_of("input")
        _report(owner, "input", original, {gemms: low})


def _report(owner: Owner, operand: Operand, original: Original, lows: Casts) -> None:
    """Notify observers of a cast, unless the backward repeats one that a forward has reported.

    It does so with activation checkpointing, and with FSDP2's second gather.
    """
    if isinstance(original.high, internals.STAND_INS):
        return
    # Observers read the bits of the values.
    values = internals.innermost(original.high).resolve_neg()
    original = original._replace(high=values)
    repeats = operand != "grad_output"
    for observer, block in [*_observers.items()]:
        new = lows
        if repeats and internals.in_backward():
            new = {g: low for g, low in lows.items() if (owner, operand, g) not in block.in_forward}
        elif repeats:
            block.in_forward.update((owner, operand, gemms) for gemms in lows)
        if new:
            _notify(observer.on_casts, owner, operand, original, new)


def notify_multiply(owner: Owner, product: Product) -> None:
    """Notify observers of a float8 GEMM, unless a backward repeats that of a forward."""
    is_repeated = product.gemm == "output" and internals.in_backward()
    if (
        is_repeated
        or not product.left.scheme.levels
        or isinstance(product.result, internals.STAND_INS)
    ):
        return
    for observer in [*_observers]:
        _notify(observer.on_multiply, owner, product)
