"""Observers of the float8 GEMMs of layers, with their operands in high precision."""

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
    """An observer of the float8 GEMMs of eager code; called as :class:`CastObserver` is."""

    def on_gemm(
        self,
        owner: Owner,
        gemm: Gemm,
        left: torch.Tensor,
        right: torch.Tensor,
        result: torch.Tensor,
    ) -> None:
        """Called after a GEMM of a layer.

        ``left`` is the input or grad_output, ``[..., K]``. ``right`` is the weight, or the input
        for grad_weight. Both are in high precision, as they were before casts and moves. ``result``
        is the result of the float8 GEMM. All of them are plain tensors, or DTensors of any
        placements. All ranks of their meshes get the same calls, so this may communicate.
        """


_gemm_observers: list[GemmObserver] = []
# Prepared inputs in high precision, by the cast number of the Float8Tensors made of each. Eager
# code passes on the number's tensor itself, so an input is kept as long as one of them lives.
_prepared: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()


@contextmanager
def gemms_observed_by(observer: GemmObserver) -> Iterator[None]:
    """Show an observer the GEMMs of all layers inside the block. Compiled code runs eagerly."""
    _gemm_observers.append(observer)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _gemm_observers[:] = [kept for kept in _gemm_observers if kept is not observer]


def are_gemms_observed() -> bool:
    """Whether GEMMs are observed; False in compiled code."""
    return bool(_gemm_observers) and not torch.compiler.is_compiling()


def keep_prepared(cast_number: torch.Tensor, input: torch.Tensor) -> None:
    """While GEMMs are observed, keep the high-precision input of layers that take it in float8."""
    if are_gemms_observed():
        _prepared[cast_number] = input.detach()


class HighPrecision(NamedTuple):
    """The operands of a forward before casts and moves; None where they are not known."""

    input: torch.Tensor | None = None
    weight: torch.Tensor | None = None


def high_precision(owner: Owner, input: torch.Tensor, weight: torch.Tensor) -> HighPrecision:
    """The high-precision operands of a forward with a possibly prepared input, gathered weight."""
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
    """Show observers a GEMM if its operands are known and it is not of a repeated forward.

    Arguments as for :meth:`GemmObserver.on_gemm`.
    """
    if left is None or right is None or result is None or (gemm == "output" and in_backward()):
        return
    with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        for observer in list(_gemm_observers):
            observer.on_gemm(owner, gemm, left, right, result)
