"""Gradients that can be computed once, and not differentiated again."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

Gradients = tuple[torch.Tensor | None, ...]
Backward = Callable[[Any, torch.Tensor | None], Gradients]


class _NoSecondDerivative(torch.autograd.Function):
    """The gradients of a layer, which can't be differentiated."""

    @staticmethod
    def forward(
        ctx: Any, fqn: str, anchor: torch.Tensor, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.fqn = fqn
        return gradients

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        raise NotImplementedError(
            f"{ctx.fqn}: a float8 layer can't be differentiated twice; leave it unconverted"
        )


def differentiable_once(backward: Backward) -> Backward:
    """A ``backward`` of a layer's function, whose ``ctx.spec.fqn`` is the layer's name.

    Under ``create_graph=True`` what is differentiated again must raise, not count as constant.
    """

    @wraps(backward)
    def once(ctx: Any, grad: torch.Tensor | None) -> Gradients:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return backward(ctx, grad)
        with torch.no_grad():
            gradients = backward(ctx, grad)
        found = [g for g in gradients if g is not None]
        anchor = torch.zeros((), requires_grad=True)
        marked = iter(_NoSecondDerivative.apply(ctx.spec.fqn, anchor, *found))
        return tuple(None if g is None else next(marked) for g in gradients)

    return once
