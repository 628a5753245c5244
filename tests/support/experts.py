"""A module unknown to the library: weights of experts [E, N, K], with one scale per expert."""

from typing import Any

import torch
from torch import nn

from fp8_dist import CastConfig, Float8LinearConfig, Float8Tensor, cast_to_float8
from fp8_dist.mesh import local_tensor
from fp8_dist.scaling import Dense
from fp8_dist.weight.float8_weight import Float8Weight
from fp8_dist.weight.weights import load_weights, save_weights

PER_EXPERT = CastConfig(scaling_granularity=Dense(per="matrix"))


def experts_config(**fields: Any) -> Float8LinearConfig:
    return Float8LinearConfig(cast_config_weight=PER_EXPERT, **fields)


class Experts(nn.Module):
    """Experts of two linear layers, which all get all tokens ``[T, dim]``; outputs are summed.

    Attributes:
        used: the data and scales of the weights in the last forward.
    """

    def __init__(self, experts: int, dim: int, hidden: int, config: Float8LinearConfig) -> None:
        super().__init__()
        torch.manual_seed(0)
        size = torch.logspace(-2, 2, experts)[:, None, None]
        self.up = nn.Parameter(torch.randn(experts, hidden, dim) * size)
        self.down = nn.Parameter(torch.randn(experts, dim, hidden))
        self.float8_weights = {n: Float8Weight(self, config, "", name=n) for n in ("up", "down")}
        self.register_state_dict_post_hook(save_weights)
        self.register_load_state_dict_pre_hook(load_weights)
        self.used: list[torch.Tensor] = []

    def _cast(self, parameter: torch.Tensor) -> torch.Tensor:
        """Cast weights, unless FSDP2 gathered them in float8, and dequantize them."""
        found: Any = parameter
        if not isinstance(local_tensor(parameter), Float8Tensor):
            found = cast_to_float8(parameter, PER_EXPERT)
        self.used += [found.qdata.clone(), found.scale.clone()]  # FSDP2 frees unsharded weights
        return found.dequantize()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.used = []
        hidden = torch.einsum("tk,enk->etn", x, self._cast(self.up)).relu()
        return torch.einsum("etn,ekn->tk", hidden, self._cast(self.down))
