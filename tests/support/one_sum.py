"""Training on a fixed list of micro-batches, with the same bits on any number of ranks."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from reference import same_bits
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fp8_dist import Float8LinearConfig, attach_update, convert_to_float8_training, float8_layers
from fp8_dist.fsdp import clip_grad_norm_, micro_batches, set_gradient_transport
from scripts.common.mixture import Router

VOCAB, DIM, HIDDEN, TOKENS = 61, 96, 144, 16

Weights = dict[str, torch.Tensor]


class Model(nn.Module):
    """A model whose rows are not multiples of 128 long, with uneven shards for most rank counts."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCAB, DIM)
            self.norm = nn.LayerNorm(DIM)
            self.up = nn.Linear(DIM, HIDDEN)
            self.down = nn.Linear(HIDDEN, DIM, bias=False)
            self.spare = nn.Linear(DIM, DIM, bias=False)
            self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.has_spare = False  # whether a forward uses the spare layer
        self.hook: Callable[[torch.Tensor], torch.Tensor] | None = None  # a hook for a gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embedding(x)
        hidden = self.up(self.norm(y))
        if self.hook is not None:
            hidden.register_hook(self.hook)
        y = y + self.down(F.gelu(hidden))
        return self.head(y + self.spare(y) if self.has_spare else y)


@functools.cache
def mesh_of(size: int, device: str = "cpu") -> DeviceMesh:
    """The mesh of `size` neighboring ranks that has this rank. `size` divides the world size."""
    shape = (dist.get_world_size() // size, size)
    return init_device_mesh(device, shape, mesh_dim_names=("others", "dp"))["dp"]


def nodes_of(count: int, per_node: int) -> DeviceMesh:
    """The nodes of `mesh_of(count * per_node)`, and of the other ranks likewise."""
    others = dist.get_world_size() // (count * per_node)
    return init_device_mesh("cpu", (others * count, per_node))


def sums(model: nn.Module) -> None:
    """Make FSDP2 sum gradients instead of averaging them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def built(
    mesh: DeviceMesh,
    recipe: str | None,
    transport: Any,
    compute: torch.dtype = torch.bfloat16,
    reduce: torch.dtype = torch.float32,
    **how: Any,
) -> Model:
    model = Model().to(mesh.device_type)
    if recipe is not None:
        config = Float8LinearConfig.from_recipe_name(recipe)
        config = replace(config, enable_fsdp_float8_all_gather="auto", pad_inner_dim=True)
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, name: name != "head"
        )
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(compute, reduce))
    sums(model)
    set_gradient_transport(model, transport, **how)
    return model


def batches(step: int, count: int) -> torch.Tensor:
    """Inputs and targets ``[2, count, 2, TOKENS]``."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCAB, (2, count, 2, TOKENS), generator=generator)


def backward(
    model: nn.Module, mesh: DeviceMesh, step: int, count: int = 8, order: Any = micro_batches
) -> None:
    """Compute the gradients of a step."""
    inputs, targets = batches(step, count).to(mesh.device_type)
    model.has_spare = step % 2 == 0
    for index, weight in order(count, mesh):
        for module in model.modules():
            if isinstance(module, Router):
                module.balance_weight = weight / count
        logits = model(inputs[index]).float().flatten(0, 1)
        loss = F.cross_entropy(logits, targets[index].flatten(), reduction="sum")
        (loss * (weight / targets.numel())).backward()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    steps: Iterable[int],
    exact: bool = True,
    **options: Any,
) -> Weights:
    """Train for some steps; return the weights, and the norm of the last gradient."""
    for step in steps:
        backward(model, mesh, step, **options)
        norm = clip_grad_norm_(model.parameters(), 0.5, exact=exact)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() for name, p in model.named_parameters()} | {"norm": norm}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    if float8_layers(model):
        attach_update(optimizer, model)
    return optimizer


def trained(
    mesh: DeviceMesh,
    recipe: str | None = "tensorwise",
    transport: Any = "float8",
    compute: torch.dtype = torch.bfloat16,
    steps: int = 3,
    how: dict[str, Any] | None = None,
    **options: Any,
) -> Weights:
    """Build a model, and return the result of `train`.

    how: further arguments of ``built``. options: further arguments of ``train``.
    """
    model = built(mesh, recipe, transport, compute, **(how or {}))
    return train(model, optimizer_of(model), mesh, range(steps), **options)


def differing(one: Weights, other: Weights) -> list[str]:
    """The names of weights whose bits differ."""
    return [name for name, each in one.items() if not same_bits(each, other[name])]
