"""Observers of the casts and GEMMs of layers, for statistics, recordings and tests.

Without an observer, a cast only checks a Python variable. While there is an observer, all code runs
eagerly, so compiled code needs neither operators nor guards for observers.

An input that ``PrepareFloat8ModuleInput`` casts for several layers is *prepared*. Each of these
layers reports the cast when it takes the input, perhaps after a gather. For this, the Float8Tensor
has an :class:`Origin`, which refers to the tensor before the cast.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from fp8_dist import torch_internals as internals
from fp8_dist.cast import Copies
from fp8_dist.config import Float8LinearConfig
from fp8_dist.kernels import Groups
from fp8_dist.mesh import Layout, local_tensor
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import Quantized, Scheme
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


class Source(NamedTuple):
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
        """Called after a local operand was cast, or when a layer takes a prepared input.

        ``lows`` maps the GEMMs that take each float8 copy to the copy, in the shape of the source.
        """

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
        is the result of the float8 GEMM. No mesh is supported: all three are plain tensors.
        """


class Origin(NamedTuple):
    """The tensor that a prepared input was cast from, with its local float8 copy."""

    high: torch.Tensor  # plain or a DTensor, detached
    low: Quantized


class _Registration(NamedTuple):
    """The registration of an observer for the body of a ``with`` statement."""

    gemms: bool  # whether ``on_gemm`` is called
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


def are_gemms_observed() -> bool:
    """Whether an observer is notified of GEMMs with their operands in high precision."""
    return is_observed() and any(block.gemms for block in _observers.values())


@contextmanager
def observed_by(observer: Observer, gemms: bool = False) -> Iterator[None]:
    """Register an observer of the casts of all layers inside the block, which runs eagerly.

    With ``gemms``, operands are kept in high precision, and ``on_gemm`` is called too.
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
        with internals.without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
            method(*arguments)
    else:  # in an autograd function, where entering these contexts would only cost time
        method(*arguments)


def observe(
    owner: Owner, operand: Operand, source: Source, copies: Copies, repeats: bool = True
) -> None:
    """Notify observers of the cast of an operand.

    Args:
        repeats: whether a backward may repeat the cast (activation checkpointing, FSDP2's second
            gather). A backward then reports the cast only if no forward did. (A forward without
            gradients does not make the casts that only the backward needs.)
    """
    gemms_of = {scheme: gemms for gemms, scheme in owner.casts_of(operand).items()}
    shape = source.high.shape
    lows: dict[tuple[Gemm, ...], Quantized] = {}
    for low in copies:
        if low.qdata.shape != shape:  # a transposed copy may have more rows, of zeros
            low = low._replace(qdata=low.qdata[: math.prod(shape[:-1])].view(shape))
        lows.setdefault(gemms_of[low.scheme], low)
    _report(owner, operand, source, lows, repeats)


def observe_prepared(owner: Owner, prepared: Float8Tensor) -> None:
    """Notify observers of the cast of a prepared input that a layer takes."""
    if prepared.origin is not None:  # else the cast was not observed
        high, low = prepared.origin
        (gemms,) = owner.casts_of("input")
        source = Source(local_tensor(high), Layout.of(high))
        _report(owner, "input", source, {gemms: low}, repeats=True)


def _report(owner: Owner, operand: Operand, source: Source, lows: Casts, repeats: bool) -> None:
    if isinstance(source.high, internals.STAND_INS):
        return
    source = source._replace(high=internals.innermost(source.high))
    for observer, block in [*_observers.items()]:
        new = lows
        if repeats and internals.in_backward():
            new = {g: low for g, low in lows.items() if (owner, operand, g) not in block.in_forward}
        elif repeats:
            block.in_forward.update((owner, operand, gemms) for gemms in lows)
        if new:
            _notify(observer.on_casts, owner, operand, source, new)


def observe_multiply(owner: Owner, product: Product) -> None:
    """Notify observers of a float8 GEMM."""
    if isinstance(product.result, internals.STAND_INS):
        return
    for observer in [*_observers]:
        _notify(observer.on_multiply, owner, product)


def observe_gemm(
    owner: Owner,
    gemm: Gemm,
    left: torch.Tensor | None,
    right: torch.Tensor | None,
    result: torch.Tensor | None,
) -> None:
    """Notify observers of a GEMM, unless an operand is None or the backward repeats the forward."""
    is_repeated = gemm == "output" and internals.in_backward()
    if left is None or right is None or result is None or is_repeated:
        return
    for observer in [observer for observer, block in _observers.items() if block.gemms]:
        _notify(observer.on_gemm, owner, gemm, left, right, result)
