"""convert_to_linear on meshes: the model trains on as if it had never been converted."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any

import pytest
import torch
from nets import Net, full_state, net_plan
from rank_tests import on_ranks
from ranks import device_mesh
from reference import all_warnings, raised, same_bits
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from fp8_dist import (
    Float8LinearConfig,
    attach_update,
    convert_to_float8_training,
    convert_to_linear,
    float8_layers,
    freeze_to_float8,
    unfreeze_from_float8,
)
from fp8_dist.debug import comm_audit
from fp8_dist.mesh import local_tensor
from fp8_dist.moe import convert_experts_to_float8_training
from fp8_dist.tensor_parallel import apply_tp_plan, declare_placements

CASES = [(2, 1, "mxfp8"), (1, 2, "delayed"), (2, 2, "tensorwise"), (2, 2, "rowwise")]
DIMS = {"dim": 64, "hidden": 128}


def shard(net: Net, mesh: Any, recipe: str = "") -> None:
    """FSDP2 with a group for each layer, one for a single linear layer, and one for the rest."""
    # With mxfp8, activations and high-precision gathers are bf16.
    compute = torch.bfloat16 if recipe == "mxfp8" else None
    arguments = {"mp_policy": MixedPrecisionPolicy(param_dtype=compute)}
    if mesh.size() > 1:
        for module in (net.layers[0].w2, *net.layers, net):
            fully_shard(module, mesh=mesh, **arguments)


def plain_plan(net: Net) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for i in range(len(net.layers)):
        plan[f"layers.{i}"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        plan[f"layers.{i}.w1"] = plan[f"layers.{i}.w3"] = ColwiseParallel()
        plan[f"layers.{i}.w2"] = RowwiseParallel(output_layouts=Shard(1))
    return plan


def trained(net: nn.Module, optimizer: Any, x: torch.Tensor, steps: int) -> list[torch.Tensor]:
    outputs = []
    for _ in range(steps):
        output = net(x)
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(output.detach())
    return outputs


@pytest.mark.parametrize(("dp", "tp", "recipe"), CASES)
@on_ranks("dp", "tp", returns=[])
def test_trains_on_as_if_never_converted(dp: int, tp: int, recipe: str) -> list[str]:
    mesh = device_mesh(dp=dp, tp=tp)
    config = Float8LinearConfig.from_recipe_name(recipe)
    gather: Any = "auto" if dp > 1 else False
    config = replace(config, enable_fsdp_float8_all_gather=gather)
    net = Net(**DIMS)
    calls: list[str] = []
    net.layers[1].w2.register_forward_hook(
        lambda layer, *args: calls.append(type(local_tensor(layer.weight)).__name__)
    )
    convert_to_float8_training(net, config=config)
    if tp > 1:
        apply_tp_plan(net, mesh["tp"], net_plan(net, True))
    shard(net, mesh["dp"], recipe)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    attach_update(optimizer, net)
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(mesh.get_local_rank("dp")))
    x = x.chunk(tp, 1)[mesh.get_local_rank("tp")].contiguous()
    trained(net, optimizer, x, 2)
    parameters, saved = dict(net.named_parameters()), full_state(net)
    keys = list(net.state_dict())

    wrong = [] if convert_to_linear(net) is convert_to_linear(net) is net else ["the result"]
    wrong += [f"{n}: {type(m)}" for n, m in net.named_modules() if "Float8" in type(m).__name__]
    wrong += [n for n, p in net.named_parameters() if p is not parameters[n]]
    wrong += [n for n, t in full_state(net).items() if not same_bits(t, saved[n])]
    wrong += [] if list(net.state_dict()) == keys else ["the names"]

    twin = Net(**DIMS)
    twin.load_state_dict(saved)
    if tp > 1:
        parallelize_module(twin, mesh["tp"], plain_plan(twin))
    shard(twin, mesh["dp"], recipe)
    twins = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    optimizer.state.clear()  # the twin begins without moments, too
    with comm_audit() as audit:
        outputs = trained(net, optimizer, x, 2)
    with comm_audit() as expected:
        references = trained(twin, twins, x, 2)
    wrong += [f"output {i}" for i in range(2) if not same_bits(outputs[i], references[i])]
    theirs = full_state(twin)
    wrong += [f"{n} after" for n, t in full_state(net).items() if not same_bits(t, theirs[n])]
    if str(audit.table()) != str(expected.table()):
        wrong.append(f"{audit.table()} instead of {expected.table()}")
    plain = {*calls[2:]} <= {"Tensor", "Parameter"}
    return wrong + ([] if len(calls) == 4 and plain else [f"hooks: {calls}"])


@on_ranks(2)
def test_the_way_back_to_float8() -> None:
    """Do what the error of a second conversion asks for."""
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)

    def made() -> Net:
        net = convert_to_float8_training(Net(**DIMS), config=config)
        shard(net, device_mesh(dp=2))
        return net

    net, x = made(), torch.ones(2, 8, 64)
    trained(net, torch.optim.SGD(net.parameters(), lr=0.1), x, 2)
    expected = net(x)
    convert_to_linear(net)
    assert not same_bits(net(x), expected)
    text = raised(ValueError, lambda: convert_to_float8_training(net, config=config))
    assert "distributed already: layers.*.w1 (" in text
    assert "make a new model in this order, and load the state_dict of this one" in text
    again = made()
    again.load_state_dict(net.state_dict())
    assert same_bits(again(x), expected)


def warned_of_ddp(change: Callable[[nn.Module], object], net: nn.Module) -> bool:
    with all_warnings() as texts:
        change(net)
    return any("that was made before does not reduce" in text for text in texts)


@on_ranks(2, returns=None)
def test_ddp_of_before_does_not_reduce_what_was_replaced() -> None:
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    before = list(net.parameters())
    model = DistributedDataParallel(net)
    convert = partial(convert_to_float8_training, config=config)
    assert not warned_of_ddp(convert, model.module)
    assert not warned_of_ddp(convert_to_linear, net)
    assert not warned_of_ddp(convert, net)
    assert all(map(is_, before, net.parameters()))
    freeze_to_float8(model.requires_grad_(False))
    assert warned_of_ddp(unfreeze_from_float8, net)
    del model
    gc.collect()
    freeze_to_float8(net)
    assert not warned_of_ddp(unfreeze_from_float8, net)


class Experts(nn.Module):
    float8_weight_names = ("up",)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(2, 32, 32))


@on_ranks(2, returns=None)
def test_refusals_on_ranks_change_nothing() -> None:
    mesh = device_mesh(dp=2)
    net = Net(**DIMS)
    convert_to_float8_training(net, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    shard(net, mesh)
    net(torch.ones(1, 2, 64))
    net.unshard()
    net.layers[1].unshard()
    found = raised(ValueError, lambda: convert_to_linear(net.layers[1].w1))
    assert (
        "the module can't become an nn.Linear: it is gathered by FSDP2; pass the model that fully_shard was"
        in found
    )
    assert len(float8_layers(net)) == 6
    tp = Net(**DIMS)
    convert_to_float8_training(tp)
    apply_tp_plan(tp, device_mesh(tp=2), net_plan(tp, True))
    found = raised(ValueError, lambda: convert_to_linear(tp.layers[0].w3))
    assert "shares its input or weight with layers.0.w1; pass the block that has both" in found
    tied = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    tied[1].weight = tied[0].weight
    convert_to_float8_training(tied, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    fully_shard(tied, mesh=mesh)
    found = raised(ValueError, lambda: convert_to_linear(tied[1]))
    assert "shares its input or weight with 0; pass the block that has both" in found
    convert_to_linear(tp.layers[0])
    assert list(float8_layers(tp)) == ["layers.1.w1", "layers.1.w3", "layers.1.w2"]
    tp(torch.ones(1, 2, 64)).sum().backward()
    experts = convert_experts_to_float8_training(Experts())
    fully_shard(experts, mesh=mesh)
    found = raised(NotImplementedError, lambda: convert_to_linear(experts))
    assert (
        "the experts (the module itself) can't be converted back in place: they are dist" in found
    )
    layer = convert_to_float8_training(nn.Linear(64, 32))
    places = {"weight": Shard(0), "input": Replicate(), "output": Shard(-1)}
    declare_placements(layer, device_mesh(tp=2), **places)
    found = raised(ValueError, lambda: convert_to_linear(layer))
    assert "nn.Linear: it communicates in its forward, as declare_placements says" in found


@on_ranks(2)
def test_a_whole_weight_takes_an_input_as_it_is_sharded() -> None:
    """As the float8 layer does: nothing moves, before or after."""
    mesh = device_mesh(tp=2)
    net = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64, bias=False)))
    net[0].weight = nn.Parameter(distribute_tensor(net[0].weight.detach(), mesh, (Replicate(),)))
    net[0].output_placements = (Shard(0),)
    x = DTensor.from_local(torch.randn(4, 64), mesh, (Shard(0),))
    with comm_audit(mesh) as audit:
        net(x)
        moved = audit.count("all_gather")
        output = convert_to_linear(net)(x)
    assert (moved, audit.count("all_gather")) == (0, 0)
    assert output.placements == (Shard(0),)
