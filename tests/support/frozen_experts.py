"""Experts of a user's class whose frozen weights are stored in float8, or only have their values."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8_dist import freeze_to_float8, unfreeze_from_float8
from fp8_dist.mesh import local_tensor
from fp8_dist.moe import (
    Float8ExpertsConfig,
    convert_experts_to_float8_training,
    dispatch_linear,
    linear_combine,
    route,
)

EXPERTS, DIM, INNER, RANK = 6, 64, 96, 16


class Experts(nn.Module):
    """Two projections, their product and a projection back, with low-rank adapters of the first.

    ``is_transposed``: the first weight is stored as ``[E, K, N]``.
    """

    float8_weight_names = ("gate", "up", "down")
    float8_experts_config: Float8ExpertsConfig | None = None
    is_transposed = False

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(n: int, k: int) -> nn.Parameter:
            values = torch.randn(EXPERTS, n, k, generator=generator) / 8
            return nn.Parameter((values * torch.linspace(-4, 4, k).exp()).bfloat16())

        self.gate, self.up = parameter(INNER, DIM), parameter(INNER, DIM)
        if self.is_transposed:
            self.gate = nn.Parameter(self.gate.detach().mT.contiguous())
        self.down = parameter(DIM, INNER)
        self.a, self.b = parameter(RANK, DIM), parameter(INNER, RANK)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(2 * len(x)).view(-1, 2) % (EXPERTS - 1)  # the last has no tokens
        group = self.up.device_mesh.get_group() if isinstance(self.up, DTensor) else None
        routing, config = route(ids, EXPERTS, group), self.float8_experts_config
        first = self.gate.mT if self.is_transposed else self.gate
        gate, up, low = dispatch_linear(x, [first, self.up, self.a], routing, config)
        b = local_tensor(self.b).float()[routing.groups.group_of_row]
        gate = gate + torch.einsum("rnk,rk->rn", b, low.float()).to(gate.dtype)
        return linear_combine(gate.relu() * up, self.down, routing, config).sum(1)


class Transposed(Experts):
    is_transposed = True


class Storage(NamedTuple):
    """A recipe and the arguments of ``freeze_to_float8``."""

    recipe: Any
    format: Any = "float8"
    block_size: tuple[int, int] | None = None
    fields: Mapping[str, Any] = MappingProxyType({})  # of the config

    @property
    def has_square_blocks(self) -> bool:
        """Whether a transposed weight has the same scales."""
        return self.recipe != "rowwise_folded" and "weight_block_size" not in self.fields


RELEASED = {"format": "mxfp4", "block_size": (1, 32)}
STORED = {
    **{
        recipe: Storage(recipe) for recipe in ("rowwise_folded", "tensorwise", "blockwise", "mxfp8")
    },
    "unpacked": Storage("mxfp8", fields={"weight_format": "mxfp4"}),
    "mxfp4": Storage("mxfp8", "mxfp4", fields={"weight_format": "mxfp4"}),
    "mxfp4 of blockwise": Storage("blockwise", "mxfp4", fields={"weight_format": "mxfp4"}),
    "rows of mxfp4": Storage(
        "mxfp8", "mxfp4", fields={"weight_format": "mxfp4", "weight_block_size": (1, 32)}
    ),
    "1 x 32 in bf16": Storage(None, **RELEASED),
    **{
        f"1 x 32 of {recipe}": Storage(recipe, **RELEASED)
        for recipe in ("rowwise_folded", "tensorwise", "blockwise", "mxfp8")
    },
}


def made(storage: Storage, store: bool = True, kind: type[Experts] = Experts) -> nn.Sequential:
    """Experts with adapters to train; without ``store``, the weights are cast in each forward."""
    net = nn.Sequential(kind())
    config = Float8ExpertsConfig(
        storage.recipe, enable_fsdp_float8_all_gather=False, **storage.fields
    )
    convert_experts_to_float8_training(net, config=config)
    for name in Experts.float8_weight_names:
        net[0].get_parameter(name).requires_grad_(False)
    if store or storage.block_size:
        names = freeze_to_float8(net, format=storage.format, block_size=storage.block_size)
        assert names == [f"0.{name}" for name in Experts.float8_weight_names]
    if not store and storage.block_size:
        unfreeze_from_float8(net)
    return net


def batch(rank: int, tokens: int = 20) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(tokens, DIM, generator=generator).bfloat16()


def run(net: nn.Module, rank: int = 0) -> dict[str, Tensor]:
    """The outputs and the gradients of inputs in two passes."""
    found = {}
    for i in range(2):
        x = batch(rank + 10 * i).requires_grad_()
        output = net(x)
        output.float().square().mean().backward()
        assert x.grad is not None
        found |= {f"output {i}": output.detach(), f"x {i}": x.grad}
    return found


def gradients(net: nn.Module) -> dict[str, Tensor]:
    """The local gradients of adapters."""
    return {n: local_tensor(p.grad) for n, p in net.named_parameters() if p.grad is not None}
