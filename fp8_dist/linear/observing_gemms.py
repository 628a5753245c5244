"""The float8 GEMMs of layers, shown to observers with the operands in high precision."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fp8_dist.config import Gemm
from fp8_dist.linear.observing import Owner
from fp8_dist.mesh import local_tensor
from fp8_dist.tensor import Float8Tensor
from fp8_dist.torch_internals import in_backward, without_dispatch_modes


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


_gemm_observers: list[GemmObserver] = []
# Prepared inputs in high precision, by the cast number of the Float8Tensors made of each. (Eager
# code hands on the number's tensor itself. An input is kept for as long as one of them lives.)
_prepared: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()


@contextmanager
def gemms_observed_by(observer: GemmObserver) -> Iterator[None]:
    """Show an observer the GEMMs of all layers inside the block, in which all code is eager."""
    _gemm_observers.append(observer)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _gemm_observers[:] = [kept for kept in _gemm_observers if kept is not observer]


def are_gemms_observed() -> bool:
    """Whether anybody observes GEMMs."""
    return bool(_gemm_observers) and not torch.compiler.is_compiling()


def keep_prepared(cast_number: torch.Tensor, input: torch.Tensor) -> None:
    """Keep an input in high precision, for the layers that take it in float8."""
    if are_gemms_observed():
        _prepared[cast_number] = input.detach()


class HighPrecision(NamedTuple):
    """The operands of a forward before casts and moves; what is not known is None."""

    input: torch.Tensor | None = None
    weight: torch.Tensor | None = None


def high_precision(owner: Owner, input: torch.Tensor, weight: torch.Tensor) -> HighPrecision:
    """The operands of a forward, whose input may be prepared and whose weight gathered."""
    local, high = local_tensor(input), None
    if not isinstance(local, Float8Tensor):
        high = input.detach()
    elif local.cast_number is not None:
        high = _prepared.get(local.cast_number)
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
