"""Compiled code multiplies the current weights, and keeps no gathered weight for the backward."""

from typing import NamedTuple

import pytest
import torch
import torch.nn as nn
from graphs import Graphs
from nets import Distributed, blocks
from rank_tests import on_ranks
from reference import same_bits, saved_in
from torch.distributed.tensor import DTensor

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    invalidate_float8_scales,
    precompute_float8_dynamic_scale,
)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm().detach() / exact.norm().detach())


@pytest.mark.parametrize("precomputed", [False, True])
def test_another_tensor_in_the_place_of_the_weight(precomputed: bool) -> None:
    layer, x = Float8Linear(32, 48, bias=False, config=Float8LinearConfig()), torch.randn(16, 32)
    if precomputed:
        precompute_float8_dynamic_scale(layer)

    def other(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    weight = (100 * layer.weight.detach()).requires_grad_()
    compiled = torch.compile(other, backend="aot_eager")
    assert error(compiled(weight), x @ weight.t()) < 0.05
    assert error(layer(x), x @ layer.weight.t()) < 0.05  # the other weight left nothing behind


def test_a_weight_that_the_graph_updates() -> None:
    layer, x = Float8Linear(32, 48, bias=False, config=Float8LinearConfig()), torch.randn(16, 32)

    @torch.compile(backend="aot_eager")
    def step() -> tuple[torch.Tensor, torch.Tensor]:
        before = layer(x)
        with torch.no_grad():
            layer.weight.mul_(100.0)
        return before, layer(x)

    for _ in range(2):
        exact = x @ layer.weight.detach().t()
        before, after = step()
        assert error(before, exact) < 0.05
        assert error(after, 100 * exact) < 0.05


def test_a_compiled_evaluation_uses_no_scale_that_training_has_left() -> None:
    """A write to ``.data`` enlarges the weight unnoticed. With an old scale it would saturate."""
    layer, x = Float8Linear(32, 32), torch.randn(4, 32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    layer.weight.data.mul_(100)
    with torch.no_grad():
        found = compiled(x)
    invalidate_float8_scales(layer)
    assert same_bits(found, layer(x).detach())


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Held(NamedTuple):
    """Bytes of tensors saved for the backward: of weights, and of others; and their number."""

    weights: int
    rest: int
    count: int


def held_by(net: nn.Module, x: torch.Tensor) -> Held:
    sizes = {tuple(p.shape) for p in net.parameters() if p.ndim == 2}
    output, tensors = saved_in(lambda: net(x))
    plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    weights = [t for t in plain if {tuple(t.shape), tuple(t.shape[::-1])} & sizes]
    rest = [t for t in plain if all(t is not weight for weight in weights)]
    held = []
    for group in (weights, rest):
        storages = {storage(t): t.untyped_storage().nbytes() for t in group}
        held.append(sum(storages.values()))
    output.sum().backward()
    return Held(*held, len(weights))


@pytest.mark.filterwarnings("ignore")
# (Weights that FSDP2 gathers in high precision are cast again in the backward, not saved.)
@pytest.mark.parametrize(("recipe", "gather"), [("rowwise_folded", True), ("rowwise", False)])
@on_ranks(2)
def test_no_unsharded_weight_outlives_its_layer(recipe: str, gather: bool) -> None:
    config, found = Float8LinearConfig.from_recipe_name(recipe), []
    for layers in (2, 4, 8):
        arguments = {"layers": layers}
        world = Distributed(2, 1, config=config, gather=gather, net_arguments=arguments)
        precompute_float8_dynamic_scale(world.net)
        found.append(held_by(world.net, world.mine(torch.randn(4, 8, 64))))
    weights, rest, count = zip(*found, strict=True)
    # All except w1 and w3 of the first layer, whose input needs no gradient.
    assert count == (4, 10, 22)
    assert weights == (0, 0, 0)  # FSDP2 freed all unsharded weights
    assert rest[1] - rest[0] == (rest[2] - rest[1]) // 2 > 0


@pytest.mark.filterwarnings("ignore")
@on_ranks(2, returns=0, timeout=180)
def test_no_unsharded_weight_outlives_its_graph() -> int:
    """The bytes of weights that two compiled blocks save in their second step.

    (By default a graph merges equal ops, such as the casts of forward and backward.)
    """
    torch._dynamo.reset()
    world = Distributed(2, 1, gather=False, shard=False)
    model = blocks(world)
    for block in model:
        block.compile(backend=Graphs().backend, fullgraph=True)
    world.fully_shard(model, model)
    precompute_float8_dynamic_scale(model)
    for _ in range(2):
        found = held_by(model, world.mine(torch.randn(4, 8, 64)).requires_grad_())
    return found.weights
