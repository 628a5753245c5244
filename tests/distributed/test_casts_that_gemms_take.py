"""Casts are made, and recorded, for those GEMMs alone that run: in each way to run a model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    convert_to_float8_training,
)
from fp8_dist.debug import CastStats, comm_audit, float8_stats
from fp8_dist.tensor_parallel import Float8ColwiseParallel, apply_tp_plan

RECIPES = [recipe.value for recipe in Float8LinearRecipeName]


def layers(recipe: str) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
    return convert_to_float8_training(net, config=Float8LinearConfig.from_recipe_name(recipe))


def without_input_gradient(net: nn.Module, x: torch.Tensor) -> None:
    net(x).sum().backward()


def without_weight_gradient(net: nn.Module, x: torch.Tensor) -> None:
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    net(x.requires_grad_()).sum().backward()


def without_gradients(net: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        net(x)


MODES = [without_input_gradient, without_weight_gradient, without_gradients]


def casts(recipe: str, way: str, mode: Callable[[nn.Module, torch.Tensor], None]) -> list[str]:
    """What is recorded."""
    torch._dynamo.reset()
    net = layers(recipe)
    if way == "FSDP2":
        for module in (*net, net):
            fully_shard(module, mesh=device_mesh(dp=2))
    if way == "compiled":
        net.compile(backend="aot_eager", fullgraph=True)
    stats = float8_stats(net)
    with stats:
        mode(net, torch.ones(16, 32))
    rows = [row for row in stats.rows if isinstance(row, CastStats)]
    return [f"{row.fqn} {row.operand} {'+'.join(row.gemms)}" for row in rows]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
def test_the_same_casts_in_each_way(
    ranks: RankPools, mode: Callable[[nn.Module, torch.Tensor], None]
) -> None:
    found = {}
    for recipe in RECIPES:
        found[recipe] = ranks(2).run(casts, recipe, "eager", mode)[0]
        compiled = recipe == "rowwise" or (
            recipe == "rowwise_folded" and mode is without_input_gradient
        )
        for way in ("FSDP2", "compiled")[: 1 + compiled]:
            assert ranks(2).run(casts, recipe, way, mode)[0] == found[recipe], (recipe, way)
    output = [f"{layer} {operand} output" for layer in (0, 1) for operand in ("input", "weight")]
    backward = {
        without_input_gradient: [
            *(f"{layer} input grad_weight" for layer in (0, 1)),
            *(f"{layer} grad_output grad_weight" for layer in (0, 1)),
            "1 weight grad_input",
            "1 grad_output grad_input",
        ],
        without_weight_gradient: [
            *(f"{layer} weight grad_input" for layer in (0, 1)),
            *(f"{layer} grad_output grad_input" for layer in (0, 1)),
        ],
        without_gradients: [],
    }[mode]
    assert sorted(found["rowwise"]) == sorted(output + backward)


class Float8Results(TorchDispatchMode):
    """Counts the float8 tensors that operators of the library make."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func.namespace == "fp8_dist":
            tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            self.count += sum(t.dtype is torch.float8_e4m3fn for t in tensors)
        return result


def test_what_no_gemm_takes_is_not_cast() -> None:
    counts = []
    for requires_grad, grad_mode in ((True, True), (False, True), (True, False)):
        layer = layers("rowwise")[0]
        x = torch.ones(16, 32, requires_grad=requires_grad)
        with torch.set_grad_enabled(grad_mode), Float8Results() as made:
            layer(x)
        counts.append(made.count)
    assert counts == [4, 3, 2]  # input and weight, each for two GEMMs


def gradients(layer: nn.Module, requires_grad: bool, reentrant: bool = False) -> list[Any]:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    x.requires_grad_(requires_grad)
    layer.weight.grad = None  # type: ignore[assignment]
    output = checkpoint(layer, x, use_reentrant=True) if reentrant else layer(x)
    output.square().sum().backward()
    return [x.grad, layer.weight.grad]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_scale_that_was_left_out_is_found_when_it_is_needed(compiled: bool) -> None:
    torch._dynamo.reset()
    layer, other = (layers("rowwise")[0] for _ in range(2))
    assert isinstance(layer, Float8Linear)
    if compiled:
        layer.compile(backend="aot_eager", fullgraph=True)
    expected, cache = gradients(other, True), layer.float8_weight.cache
    gradients(layer, False)
    assert len(cache.known or {}) == 1
    torch.testing.assert_close(gradients(layer, True), expected, rtol=0, atol=0)
    assert len(cache.known or {}) == 2
    # A pass without gradients, and one within the backward.
    cache.drop()
    found = gradients(layer, True, reentrant=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@on_ranks(2, returns=[0, 1, 0, 0])
def test_ranks_reduce_a_scale_once() -> list[int]:
    """Of a column-parallel layer, whose scales for grad_input cover all ranks; in each forward."""
    net = layers("rowwise")
    apply_tp_plan(net, device_mesh(tp=2), {"0": Float8ColwiseParallel()})
    counts = []
    for requires_grad in (False, True, False, True):
        x = torch.ones(16, 32, requires_grad=requires_grad)
        with comm_audit() as audit:
            net[0](x)
        counts.append(audit.count())
    assert isinstance(net[0].weight, DTensor)
    return counts
