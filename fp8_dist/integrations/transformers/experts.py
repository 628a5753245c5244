"""transformers' experts in float8: the implementation ``"fp8_dist"`` of its experts interface."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fp8_dist.moe.dispatch import route
from fp8_dist.moe.experts import Kind, expert_group, experts_config, weight_of
from fp8_dist.moe.functions import combined_product, dispatched_product, local_part
from fp8_dist.moe.grouped import add_bias

IMPLEMENTATION = "fp8_dist"


@torch.compiler.disable(reason="fp8_dist: the host reads how many rows an expert has")
def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of converted experts, as transformers' experts interface calls it.

    Args:
        hidden_states: ``[T, H]``.
        top_k_index, top_k_weights: ``[T, top_k]``.

    Returns:
        ``[T, H]``.

    Collectives: if the experts are divided between ranks, those of ``route``, ``dispatch_linear``
    and ``linear_combine``.
    """
    config, (first, second) = experts_config(self), _weights(self)
    assert config is not None
    routing = route(top_k_index, *expert_group(self))
    (hidden,) = dispatched_product(hidden_states, [weight_of(self, first)], routing, config)
    bias = None
    if self.has_bias:
        first_bias, bias = (local_part(getattr(self, f"{name}_bias")) for name in (first, second))
        hidden = add_bias(hidden, first_bias, routing.groups)
    hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
    slots = combined_product(hidden, weight_of(self, second), routing, config, bias)
    slots = slots.view(*top_k_weights.shape, slots.shape[1])
    return (slots * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _weights(module: nn.Module) -> tuple[str, ...]:
    first = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    found = [module._parameters.get(name) for name in (first, "down_proj")]
    is_experts = all(parameter is not None and parameter.ndim == 3 for parameter in found)
    return (first, "down_proj") if is_experts else ()


def _are_transposed(module: Any) -> bool:
    return module.is_transposed


def _unfit(module: nn.Module) -> str | None:
    if not hasattr(module, "is_transposed"):
        return "its class does not use transformers' experts interface"
    return "it has a norm after each expert" if module.has_post_expert_norm else None


def _use(module: nn.Module) -> None:
    # A config of its own, so that unconverted experts of the model keep their implementation.
    config: Any = copy.copy(module.config)
    config._experts_implementation = IMPLEMENTATION
    module.config = config


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
KIND = Kind(_weights, _are_transposed, _unfit, _use)
