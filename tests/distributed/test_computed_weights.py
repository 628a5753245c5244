"""Weights that a parametrization, or a hook, computes from other parameters in each forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from delayed_steps import amaxes
from nets import GatedMLP, Net, full_state
from rank_tests import on_ranks
from ranks import device_mesh
from reference import all_warnings, raised, same_bits
from torch.distributed.fsdp import fully_shard
from torch.nn import utils
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    attach_update,
    convert_to_float8_training,
    convert_to_linear,
    float8_layers,
    precompute_float8_dynamic_scale,
    update_float8_scales,
)
from fp8_dist.debug import float8_stats
from fp8_dist.mesh import local_tensor
from fp8_dist.weight.known import KnownWeight

Normalize = Callable[[nn.Module], nn.Module]
NORMS: dict[str, Normalize] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "the older weight_norm": utils.weight_norm,
    "the older spectral_norm": utils.spectral_norm,
}
# FSDP2 gathers them in float8, and an update of scales casts them.
UPDATED = {"tensorwise", "rowwise_folded", "blockwise", "mxfp8"}
WARNING = (
    "these weights are computed from other parameters (a parametrization, weight_norm): "
    "layers.0.w3.weight. An update of scales leaves them out, and each forward casts them"
)


def net(recipe: str, norm: Normalize, gather: Any, before: bool, shards: bool) -> Net:
    """A float8 model, one of whose weights is computed, perhaps sharded."""
    torch.manual_seed(0)
    model = Net(layers=0)
    model.layers.append(GatedMLP(64, 96))
    config = Float8LinearConfig.from_recipe_name(recipe, enable_fsdp_float8_all_gather=gather)
    for normalizes in (before, not before):
        if normalizes:
            torch.manual_seed(1)
            norm(model.layers[0].w3)
        else:
            convert_to_float8_training(model, config=config)
    for module in (*model.layers, model) if shards else ():
        fully_shard(module, mesh=device_mesh(dp=2))
    return model


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attach_update(optimizer, model)
    x = torch.linspace(-1, 1, 4 * 8 * 64).view(4, 8, 64)
    torch.manual_seed(2)  # spectral norms take random steps
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state(model)


@pytest.mark.filterwarnings("ignore:.*enable_fsdp_float8_all_gather.*has no effect")
@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm")
@pytest.mark.parametrize("recipe", [recipe.value for recipe in Float8LinearRecipeName])
@on_ranks(2, returns=[])
def test_training_is_that_of_one_device(recipe: str) -> list[str]:
    """One process trains on the same input as each rank."""
    wrong = []
    for number, (name, norm) in enumerate(NORMS.items()):
        gather, before = ("auto", False)[number % 2], number == 4
        with all_warnings() as texts:
            one, sharded = (trained(net(recipe, norm, gather, before, s)) for s in (False, True))
        if not all(same_bits(value, one[key]) for key, value in sharded.items()):
            wrong.append(f"{name}: other values")
        is_left_out = gather == "auto" and not before and recipe in UPDATED
        if [text for text in texts if text.startswith("these")] != [WARNING] * is_left_out:
            wrong.append(f"{name}: {texts}")
    return wrong


@pytest.mark.filterwarnings("ignore")
@on_ranks(2, returns=None)
def test_precompute_and_back_to_linear() -> None:
    model = net("tensorwise", parametrizations.spectral_norm, "auto", False, True)
    x = torch.randn(4, 8, 64)
    with all_warnings() as texts:
        precompute_float8_dynamic_scale(model)
        model(x).sum().backward()
    assert [text for text in texts if text.startswith("these")] == [WARNING]
    assert isinstance(local_tensor(model.layers[0].w1.weight), KnownWeight)
    block = model.layers[0]
    text = raised(ValueError, lambda: precompute_float8_dynamic_scale(block.w3))
    assert "weights are not the parameters that an optimizer updates: weight (flattened" in text
    convert_to_linear(model)
    assert not isinstance(block.w3, Float8Linear)
    model(x).sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm")
@pytest.mark.parametrize("norm", NORMS)
@on_ranks(2)
def test_histories_where_all_weights_are_computed(norm: str) -> None:
    """The update runs no parametrization, and reduces amaxes over the ranks of FSDP2."""
    model = convert_to_float8_training(Net(), config=Float8LinearConfig.from_recipe_name("delayed"))
    for layer in float8_layers(model).values():
        NORMS[norm](layer)
    fully_shard(model, mesh=device_mesh(dp=2))
    x = torch.randn(4, 8, 64) * (1 + torch.distributed.get_rank())
    model(x).square().mean().backward()
    computed = [part for part in model.modules() if isinstance(part, ParametrizationList)]
    runs: list[nn.Module] = []
    for part in computed:
        part.register_forward_hook(lambda part, *_: runs.append(part))
    update_float8_scales(model)
    assert runs == []
    found: list[Any] = [None, None]
    torch.distributed.all_gather_object(found, amaxes(model))
    assert found[0] == found[1]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_weight_that_code_assigns_in_place_of_the_parameter(recipe: str) -> None:
    config = Float8LinearConfig.from_recipe_name(recipe)
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64))
    convert_to_float8_training(net, config=config)
    weight = net[0].weight
    del net[0].weight
    net[0].weight = 2 * weight  # as a hypernetwork does
    with float8_stats(net) as stats:
        net(torch.randn(4, 64)).square().mean().backward()
    assert stats.rows
    if recipe == "delayed":
        update_float8_scales(net)
