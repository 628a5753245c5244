"""First-order gradients that raise if they are differentiated again."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

Gradients = tuple[torch.Tensor | None, ...]
Backward = Callable[[Any, torch.Tensor | None], Gradients]


class _NoSecondDerivative(torch.autograd.Function):
    """Identity of a layer's gradient, which raises if it is differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, fqn: str, *origins: torch.Tensor) -> torch.Tensor:
        ctx.fqn = fqn
        return gradient

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:  # type: ignore[override]
        raise NotImplementedError(
            f"{ctx.fqn}: a float8 layer can't be differentiated twice, as "
            "torch.autograd.functional.jvp and hessian do; leave it unconverted"
        )


def differentiable_once(backward: Backward) -> Backward:
    """Make a layer's ``backward`` raise under a second differentiation.

    Otherwise ``create_graph=True`` would treat gradients as constants. ``ctx.spec.fqn`` is the
    layer's name.
    """

    @wraps(backward)
    def once(ctx: Any, grad: torch.Tensor | None) -> Gradients:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return backward(ctx, grad)
        with torch.no_grad():
            gradients = backward(ctx, grad)
        # The gradient is a function of grad_output and of everything that the output depends on.
        # With these as arguments, differentiating it with respect to any of them raises.
        origins, fqn = (*_leaves(ctx), grad), ctx.spec.fqn
        return tuple(
            g if g is None else _NoSecondDerivative.apply(g, fqn, *origins) for g in gradients
        )

    return once


def _leaves(node: Any) -> list[torch.Tensor]:
    """The leaves of the autograd graph that ends in a node."""
    leaves, seen, open_nodes = [], {node}, [node]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(getattr(node, "variable", None), torch.Tensor):  # an AccumulateGrad
            leaves.append(node.variable)
        new = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= new
        open_nodes += new
    return leaves
