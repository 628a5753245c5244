"""An input that is cast once, before the layers that take it."""

from typing import Any

import torch

from fp8_dist.cast import as_float8_of, quantize_over
from fp8_dist.config import CastSpec
from fp8_dist.linear.amax_history import AmaxHistory
from fp8_dist.linear.gradient_amax import Siblings
from fp8_dist.mesh import local_tensor
from fp8_dist.tensor import Float8Tensor

# Nodes between the cast and a layer: DTensor's redistribute(), to_local() and from_local().
_MOST_NODES = 4


def prepare_input(
    input: torch.Tensor,
    cast: CastSpec,
    power_of_2: bool,
    history: AmaxHistory | None,
    siblings: int,
) -> torch.Tensor:
    """An input as a Float8Tensor, or a DTensor of one; the gradient passes unchanged.

    Args:
        input: floating point, no Partial placements.
        history: that of a DELAYED cast.
        siblings: how many layers take it and reduce the amaxes of their output gradients together
            (:mod:`.gradient_amax`), or 0. No module between the call and those layers may be a
            unit of FSDP2.
    """
    recorded = torch.is_grad_enabled()
    return _CastInput.apply(input, cast, power_of_2, history, recorded, siblings)


def siblings_of(input: torch.Tensor) -> Siblings | None:
    """The calls of layers that take a prepared input, of which this is one or a moved copy."""
    if not isinstance(local_tensor(input), Float8Tensor):
        return None
    node: Any = input.grad_fn
    for _ in range(_MOST_NODES):
        if isinstance(siblings := getattr(node, "siblings", None), Siblings):
            return siblings
        before: Any = getattr(node, "next_functions", ())
        if len(before) != 1:
            break
        node = before[0][0]
    return None


class _CastInput(torch.autograd.Function):
    """The cast; ``record``: it belongs to a training step."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        cast: CastSpec,
        power_of_2: bool,
        history: AmaxHistory | None,
        record: bool,
        siblings: int,
    ) -> torch.Tensor:
        if siblings and ctx.needs_input_grad[0]:
            ctx.siblings = Siblings(ctx, siblings)
        if history is not None:
            return history.cast(input, record)
        return as_float8_of(input, quantize_over(input, cast, power_of_2))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return grad, None, None, None, None, None
