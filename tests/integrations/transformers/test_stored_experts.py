"""Experts of transformers' models with frozen weights that are stored in float8."""

import copy
from typing import Any

import pytest
import torch
from hf_experts import IDS, Step, different, made, step
from hf_models import batch
from rank_tests import on_ranks
from ranks import device_mesh
from reference import same_bits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from fp8_dist import dequantized, freeze_to_float8, unfreeze_from_float8
from fp8_dist.linear.weights import float8_weights
from fp8_dist.mesh import local_tensor
from fp8_dist.tensor_parallel import Float8ExpertParallel, Float8ExpertTensorParallel

RECIPES = ["rowwise_folded", "tensorwise", "blockwise", "mxfp8", "mxfp4"]


def frozen(kind: str, recipe: str, store: bool = True) -> Any:
    """The weights of linear layers and experts are frozen; routers, norms and biases are not."""
    fields = {"weight_format": "mxfp4"} if recipe == "mxfp4" else {}
    model = made(kind, "mxfp8" if fields else recipe, dense=True, **fields)
    for weight in float8_weights(model).values():
        weight.parameter().requires_grad_(False)
    if store and fields:
        is_of_experts = lambda module, _: "float8_experts_config" in module.__dict__  # noqa: E731
        freeze_to_float8(model, format="mxfp4", module_filter_fn=is_of_experts)
    if store:
        freeze_to_float8(model)
    return model


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [*(("qwen3_moe", recipe) for recipe in RECIPES), *(("gpt_oss", RECIPES[i]) for i in (0, -1))],
)
def test_bits_of_stored_experts(kind: str, recipe: str) -> None:
    model = frozen(kind, recipe)
    expected = step(frozen(kind, recipe, store=False))
    copied = copy.deepcopy(model)
    # (The scales of stored weights have no counterpart, nor gradients.)
    assert different(step(model), expected) == []
    assert different(step(copied), expected) == []
    state = model.state_dict()
    loaded = frozen(kind, recipe)
    with torch.no_grad():
        for parameter in loaded.parameters():
            getattr(parameter, "plain", parameter).view(torch.uint8).zero_()
    loaded.load_state_dict(state)
    assert different(step(loaded), expected) == []
    assert all(same_bits(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    # High precision is cast, also of weights that are stored as [E, K, N].
    recast = frozen(kind, recipe)
    recast.load_state_dict(frozen(kind, recipe, store=False).state_dict())
    assert all(same_bits(tensor, state[name]) for name, tensor in recast.state_dict().items())
    experts = model.model.layers[0].mlp.experts
    values = dequantized(experts, "down_proj")
    unfreeze_from_float8(model)
    assert same_bits(experts.down_proj.detach(), values)
    assert all("scale_inv" not in name for name in model.state_dict())


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def by_features(parameter: nn.Parameter) -> Shard:
    return Shard(1 if parameter.ndim == 3 and parameter.shape[1] % 2 == 0 else 0)


def distributed(model: Any, way: str) -> Any:
    if way in ("EP", "EP x FSDP2"):
        mesh = device_mesh(ep=2) if way == "EP" else device_mesh(dp=2, ep=2)
        for each in experts_of(model):
            parallelize_module(each, mesh["ep"], Float8ExpertParallel())
            if way != "EP":
                fully_shard(each, mesh=mesh["dp"])
    elif way == "TP":
        for each in experts_of(model):
            parallelize_module(each, device_mesh(tp=2)["tp"], Float8ExpertTensorParallel())
    else:
        placement = by_features if way == "FSDP2 of features" else None
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=device_mesh(dp=2), shard_placement_fn=placement)
    return model


def compared(way: str, recipe: str, rank: int) -> None:
    ids = IDS if way == "TP" else batch(rank)
    found: list[Step] = []
    for store in (False, True):
        model = distributed(frozen("qwen3_moe", recipe, store), way)
        logits, gradients = step(model, ids)
        local = {name: None if g is None else local_tensor(g) for name, g in gradients.items()}
        found.append((logits, local))
    assert different(found[1], found[0]) == [], (way, recipe)


WAYS = {2: ["EP", "TP", "FSDP2", "FSDP2 of features"], 4: ["EP x FSDP2"]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", WAYS)
@pytest.mark.parametrize("recipe", ["rowwise_folded", "mxfp8", "mxfp4"])
@on_ranks("size")
def test_stored_experts_on_meshes(size: int, recipe: str) -> None:
    for way in WAYS[size]:
        if (way, recipe) != ("TP", "blockwise"):  # whose blocks ranks would cut in several pieces
            compared(way, recipe, torch.distributed.get_rank())
