"""Weights that other code rebuilds: ``.data =``, new parameters, and the float8 gather after that."""

import copy
import pickle
import warnings
from collections import Counter
from collections.abc import Callable
from operator import is_
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import Net
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, same_bits, validity, weights_used
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import fp8_dist.text
from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    attach_update,
    convert_to_float8_training,
    float8_layers,
    rewrap_float8_weights,
)
from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import Float8AllGatherWeight
from fp8_dist.mesh import local_tensor
from fp8_dist.tensor.known import UNKNOWN, Kept

GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def net(dtype: torch.dtype = torch.float32) -> Net:
    converted = convert_to_float8_training(Net().to(dtype), config=GATHERED)
    assert isinstance(converted, Net)
    return converted


def shard(model: Net) -> None:
    mesh = device_mesh(dp=2)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=POLICY)


def gathers(model: Net) -> tuple[dict[str, int], list[str]]:
    """The number of all-gathers of one step, by dtype; and the warnings of lost types."""
    fp8_dist.text._warned.clear()
    with warnings.catch_warnings(record=True) as caught, comm_audit() as audit:
        warnings.simplefilter("always")
        model(torch.randn(2, 8, 64)).sum().backward()
    found = Counter[str]()
    for row in audit.rows:
        if row.op == "all_gather" and row.count:
            found[str(row.dtype)] += row.count
    texts = [str(each.message) for each in caught]
    return dict(found), [text for text in texts if "high precision" in text]


IN_FLOAT8 = {"torch.float8_e4m3fn": 4}, []


def rebuild(model: nn.Module) -> None:
    """As transformers' loader does: a plain parameter in the place of each."""
    for layer in float8_layers(model).values():
        plain = layer.float8_weight.plain(layer.weight)
        layer._parameters["weight"] = nn.Parameter(plain.clone())


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "plain"])
def test_what_is_assigned_to_data_is_the_weight(wrapped: bool) -> None:
    model = net(torch.bfloat16)
    weight = model.layers[0].w1.weight
    before = weight.float()
    weight.data = weight.data.float() if wrapped else before
    assert weight.dtype == weight.data.dtype == weight.detach().dtype == torch.float32
    assert same_bits(model.state_dict()["layers.0.w1.weight"], before)
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, Float8AllGatherWeight)
    weight.data = other = torch.zeros(96, 64)
    other.fill_(3)  # shares its storage, as in torch
    assert weight.sum() == 3 * 96 * 64
    assert weight.data_ptr() == other.data_ptr() != 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_a_copied_parameter_is_one(copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = net().layers[0].w1.weight.requires_grad_(False)
    weight.label = "w1"
    twin = copied(weight)
    assert isinstance(twin, nn.Parameter)
    assert isinstance(twin, Float8AllGatherWeight)
    assert twin.label == "w1"
    assert not twin.requires_grad
    assert same_bits(twin.detach().plain, weight.detach().plain)
    assert twin.data_ptr() != weight.data_ptr()


def test_what_can_not_be_data_is_refused_by_name() -> None:
    weight = net().layers[0].w1.weight
    other = torch.zeros(96, 64, dtype=torch.int32)
    text = raised(TypeError, lambda: setattr(weight, "data", other))
    assert "must be a plain floating-point tensor, got Tensor of torch.int32; assign" in text
    assert weight.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*has no effect")
def test_data_assigned_after_writes_drops_scales() -> None:
    for writes in range(4):  # after one of these the sum of versions would be the same
        layer = Float8Linear(32, 16, config=GATHERED)
        layer.weight.data = alias = torch.ones(16, 32)
        for _ in range(writes):
            alias.mul_(0.5)
        kept: Any = Kept(layer.float8_weight.schemes, None)  # type: ignore[arg-type]
        local: Any = layer.weight
        local.store(kept, [(torch.ones(()),)], layer.weight)
        assert validity(layer.weight) > 0
        alias.fill_(100)
        layer.weight.data = alias.data  # the same memory, with a version of its own
        assert validity(layer.weight) == UNKNOWN
        assert local.recall(kept, local.plain) == {}
        with weights_used(layer) as used:
            layer(torch.ones(16, 32))
        (cast,) = used.values()
        assert cast.dequantize().min() > 50, writes


def test_writes_through_data_drop_scales() -> None:
    layer = Float8Linear(32, 16, config=GATHERED)
    layer(torch.ones(16, 32))
    layer.weight.data.fill_(100)
    with weights_used(layer) as used:
        layer(torch.ones(16, 32))
    (cast,) = used.values()
    assert cast.dequantize().min() > 50


def trained_after(change: Callable[[nn.Module], None]) -> tuple[Any, bool]:
    """Gathers of a step of a bf16 model that was upcast; whether optimizer and state are fp32."""
    model = net(torch.bfloat16)
    change(model)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found = gathers(model)
    optimizer.step()
    state = {t.dtype for t in model.state_dict().values()}
    return found, state == {torch.float32}


def upcast(model: nn.Module) -> None:
    """As accelerate's ``fsdp2_prepare_model`` does for a bf16 model with mixed precision."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.to(torch.float32)


@on_ranks(2, returns=(IN_FLOAT8, True, 1))
def test_an_optimizer_whose_parameters_are_found_by_address() -> tuple[Any, bool, int]:
    """As accelerate's FSDP2 plug-in prepares a model and the optimizer that was made for it.

    It finds the optimizer's parameters again by the addresses of the old ones.
    """
    model = net(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    old = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    (group,) = optimizer.param_groups
    addresses = [parameter.data_ptr() for parameter in group["params"]]
    upcast(model)
    shard(model)
    new = {old[name]: parameter for name, parameter in model.named_parameters()}
    group["params"] = [new[address] for address in addresses]
    attach_update(optimizer, model)
    found = gathers(model)
    with comm_audit() as audit:
        optimizer.step()
    ours = list(model.parameters())
    return found, all(map(is_, group["params"], ours)), audit.count("all_reduce")


def upcast_and_rebuild(model: nn.Module) -> None:
    upcast(model)
    rebuild(model)


def upcast_rebuild_and_rewrap(model: nn.Module) -> None:
    upcast_and_rebuild(model)
    assert rewrap_float8_weights(model) == list(float8_layers(model))


def test_a_lost_type_is_said_and_rewrapping_brings_it_back(ranks: RankPools) -> None:
    (found, (text,)), is_fp32 = ranks(2).run_same(trained_after, upcast_and_rebuild)
    assert found == {"torch.bfloat16": 4}
    assert is_fp32
    assert text.startswith("layers.0.w1: FSDP2 gathers this weight in high precision, although")
    assert "Call rewrap_float8_weights(model) after that, before fully_shard" in text
    assert ranks(2).run_same(trained_after, upcast_rebuild_and_rewrap) == (IN_FLOAT8, True)


def load(model: nn.Module) -> None:
    """As transformers loads into a model that it sharded on the meta device."""
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False):
            values = distribute_tensor(torch.ones(old.shape), old.device_mesh, old.placements)
            module._parameters[name] = nn.Parameter(values)


@on_ranks(2, returns=(IN_FLOAT8, True, True))
def test_weights_that_are_loaded_after_sharding() -> tuple[Any, bool, bool]:
    with torch.device("meta"):
        model = net()
    shard(model)
    load(model)
    before = dict(model.named_parameters())
    rewrapped = rewrap_float8_weights(model)
    same = all(p is before[name] for name, p in model.named_parameters())
    return gathers(model), len(rewrapped) == 6, same


@on_ranks(2)
def test_rewrapping_too_late_is_refused() -> None:
    model = net()
    rebuild(model)
    shard(model)
    texts = [raised(ValueError, lambda: rewrap_float8_weights(model))]
    with torch.device("meta"):
        model = net()
    shard(model)
    load(model)
    gathers(model)
    texts.append(raised(ValueError, lambda: rewrap_float8_weights(model)))
    assert {type(local_tensor(x.weight)) for x in float8_layers(model).values()} == {torch.Tensor}
    sharded, gathered = texts
    assert "layers.0.w1: FSDP2 was set up (fully_shard) after the weight lost its type" in sharded
    assert "layers.0.w1: FSDP2 has gathered it after the weight lost its type, and" in gathered


def unsharded() -> list[str]:
    """What is rewrapped of a model whose weights FSDP2 has gathered."""
    model = fully_shard(net(), mesh=device_mesh(dp=2), reshard_after_forward=False)
    model(torch.randn(2, 8, 64))
    assert not isinstance(model.layers[0].w1.weight, DTensor)
    return rewrap_float8_weights(model)


def test_weights_that_have_their_type_are_left_alone(ranks: RankPools) -> None:
    model = net()
    rebuild(model)
    assert rewrap_float8_weights(model)
    before = list(model.parameters())
    assert rewrap_float8_weights(model) == []
    assert all(map(is_, before, model.parameters()))
    assert rewrap_float8_weights(convert_to_float8_training(Net())) == []
    assert ranks(2).run_same(unsharded) == []


def test_rewrapping_keeps_ties_gradients_and_attributes() -> None:
    model = net()
    rebuild(model)
    first, second = model.layers[0].w1, model.layers[1].w1
    first._parameters["weight"] = second._parameters["weight"]
    second.weight.grad = torch.ones(96, 64)
    second.weight.is_mine = True
    second.weight.requires_grad_(False)
    rewrap_float8_weights(model)
    assert first.weight is second.weight
    assert isinstance(first.weight, Float8AllGatherWeight)
    assert first.weight.is_mine
    assert not first.weight.requires_grad
    assert same_bits(first.weight.grad, torch.ones(96, 64))


def test_rewrapping_a_weight_that_an_embedding_shares_is_refused() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(32, 16), "head": nn.Linear(16, 32, bias=False)})
    model["other"] = nn.Linear(16, 16)
    convert_to_float8_training(model, config=GATHERED)
    rebuild(model)
    model["head"].weight = model["words"].weight
    before = dict(model.named_parameters(remove_duplicate=False))
    text = raised(ValueError, lambda: rewrap_float8_weights(model))
    assert "for all its users, but head.weight is also words.weight. Leave these layers" in text
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
