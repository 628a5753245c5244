"""Ranks that set up a model differently all raise one error, which names the difference."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from local_nets import LocalMLP
from nets import Distributed, Net, net_plan
from rank_tests import on_ranks
from ranks import device_mesh
from reference import raised
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fp8_dist import (
    CastConfig,
    Float8LinearConfig,
    ScalingGranularity,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)
from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import set_gradient_transport, update_float8_scales
from fp8_dist.tensor_parallel import Float8RowwiseParallel, apply_tp_plan, declare_placements


def config_of(difference: str, is_other: bool) -> Float8LinearConfig:
    if difference == "recipe":
        return Float8LinearConfig.from_recipe_name("rowwise" if is_other else "tensorwise")
    if difference == "cast":
        rows = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
        return Float8LinearConfig(cast_config_input=rows if is_other else CastConfig())
    power_of_2 = difference == "config" and is_other
    return Float8LinearConfig(
        enable_fsdp_float8_all_gather=True, round_scales_to_power_of_2=power_of_2
    )


@on_ranks(2)
def test_a_plan_is_compared_before_it_is_applied() -> None:
    mesh, net = device_mesh(tp=2)["tp"], convert_to_float8_training(Net())
    is_other = torch.distributed.get_rank() == 1
    plan = net_plan(net, is_other)
    text = raised(ValueError, lambda: apply_tp_plan(net, mesh, plan))
    assert (
        ": input_layouts of the plan's entry 'layers.0': (Replicate(),) on rank 0; "
        "(Shard(dim=1),) on rank 1. Convert" in text
    )
    plan = net_plan(net, False) | ({"layers.0.w1": Float8RowwiseParallel()} if is_other else {})
    text = raised(ValueError, lambda: apply_tp_plan(net, mesh, plan))
    assert (
        ": the plan's entry 'layers.0.w1': Float8ColwiseParallel on rank 0; "
        "Float8RowwiseParallel on rank 1. Convert" in text
    )


def shard_all(net: Net, mesh: DeviceMesh, **arguments: Any) -> None:
    for module in (*net.layers, net):
        fully_shard(module, mesh=mesh, **arguments)


def shard_and_prefetch(net: Net, mesh: DeviceMesh) -> None:
    shard_all(net, mesh)
    first, second = net.layers
    first.set_modules_to_forward_prefetch([second])  # type: ignore[operator]


def shard_parts(net: Net, mesh: DeviceMesh) -> None:
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)


def shard_on_meta_device(net: Net, mesh: DeviceMesh) -> None:
    net.to("meta")
    shard_all(net, mesh)
    net.to_empty(device="cpu")


SHARD: dict[str, Callable[[Net, DeviceMesh], object]] = {
    "all": shard_all,
    "offloaded": partial(shard_all, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "prefetched": shard_and_prefetch,
    "parts": shard_parts,
    "meta": shard_on_meta_device,
}


def train(net: Any) -> None:
    net(torch.randn(2, 8, 64)).sum().backward()


def evaluate(net: Net) -> None:
    with torch.no_grad():
        net.eval()(torch.randn(2, 8, 64))


RUN: dict[str, Callable[[Any], object]] = {
    "train": train,
    "evaluate": evaluate,
    "compiled": lambda net: train(torch.compile(net, backend="aot_eager")),
    "a part": lambda net: net.layers[1](torch.randn(2, 8, 64)),
    "unshard by hand": lambda net: net.layers[1].unshard(),
    "precompute": precompute_float8_dynamic_scale,
    "update": update_float8_scales,
}

NAMED = {
    "config": "config.round_scales_to_power_of_2: False on ",
    "recipe": "layers.0.w1: recipe tensorwise on rank 0, rowwise on rank 1. ",
    "cast": "layers.0.w1.config.cast_config_input.scaling_granularity: ScalingGranularity.TENSORW",
    "layer": "layers.1.w2: a Float8Linear with a weight of shape [64, 96] on ",
    "block": "layers.1.w1: a Float8Linear with a weight of shape [96, 64] on ",
    "frozen": "layers.0.w3.weight.requires_grad: True on ",
}


def converted(difference: str, gather: bool, other_rank: int, net: Net | None = None) -> Net:
    """A net that one rank converts in another way."""
    is_other = torch.distributed.get_rank() == other_rank
    config = config_of(difference, is_other)
    if not gather:
        config = replace(config, enable_fsdp_float8_all_gather=False)
    left_out = {"layer": "layers.1.w2", "block": "layers.1."}.get(difference)
    converted_net = convert_to_float8_training(
        net or Net(),
        config=config,
        module_filter_fn=lambda _, name: not (is_other and left_out and name.startswith(left_out)),
    )
    assert isinstance(converted_net, Net)
    if difference == "frozen" and is_other:
        converted_net.layers[0].w3.weight.requires_grad_(False)  # type: ignore[union-attr,index]
    return converted_net


@pytest.mark.parametrize(
    ("axes", "shard", "run", "difference", "gather"),
    [
        ({"dp": 2}, "all", "train", "config", True),
        ({"dp": 2}, "all", "train", "layer", False),
        ({"dp": 2}, "offloaded", "train", "config", True),
        ({"dp": 3}, "prefetched", "train", "layer", True),
        ({"dp": 2}, "parts", "a part", "block", False),
        ({"dp": 2}, "all", "unshard by hand", "layer", True),
        ({"dp": 2}, "all", "compiled", "config", True),
        ({"dp": 2}, "meta", "train", "layer", True),
        ({"dp": 2}, "all", "precompute", "block", True),
        ({"dp": 2}, "all", "update", "frozen", True),
        ({"replicas": 2, "dp": 2}, "all", "update", "config", True),
    ],
)
@on_ranks("axes")
def test_the_first_use_compares(
    axes: dict[str, int], shard: str, run: str, difference: str, gather: bool
) -> None:
    size = math.prod(axes.values())
    net = converted(difference, gather, size - 1)
    SHARD[shard](net, device_mesh(**axes))
    error = raised(ValueError, lambda: RUN[run](net))
    assert NAMED[difference] in error
    assert f"on rank {size - 1}" in error
    if size == 4 and difference == "config":
        assert "update_float8_scales: the ranks of DeviceMesh((replicas=2, dp=2)" in error
        assert "have set up the model in different ways: layers.0.w1.config." in error
        assert "False on ranks 0, 1, 2; True on rank 3. Convert and parallelize it in the" in error


@pytest.mark.parametrize(("sharded", "difference"), [("all", "layer"), ("part", "block")])
@on_ranks(4)
def test_ranks_of_the_other_axis_are_told(sharded: str, difference: str) -> None:
    """FSDP2 over tensor parallelism by torch's styles, or over a part of the layers.

    Also where the layer that differs lives on one axis, and so not on the ranks 0 and 2.
    """
    mesh = device_mesh(dp=2, tp=2)
    net = converted(difference, True, 3)
    column, row = ColwiseParallel(), RowwiseParallel()
    first: Any = {"w1": column, "w3": column, "w2": row}
    parallelize_module(net.layers[0], mesh["tp"], first)
    if sharded == "all":
        parallelize_module(net.layers[1], mesh["tp"], first)
    shard_all(net, mesh["dp"])
    assert NAMED[difference] in raised(ValueError, lambda: train(net))


def by_torch(net: Net, mesh: DeviceMesh) -> None:
    plan: Any = {
        f"layers.{i}.{name}": RowwiseParallel() if name == "w2" else ColwiseParallel()
        for i in range(2)
        for name in ("w1", "w3", "w2")
    }
    parallelize_module(net, mesh, plan)


def by_hand(net: Net, mesh: DeviceMesh) -> None:
    for mlp in net.layers:
        for layer in (mlp.w1, mlp.w3, mlp.w2):
            is_row: Any = layer is mlp.w2
            declare_placements(
                layer,  # type: ignore[arg-type]
                mesh,
                weight=Shard(int(is_row)),
                input=Shard(-1) if is_row else Shard(1),
                output=Shard(1) if is_row else Shard(-1),
            )


PARALLELIZE: dict[str, Callable[[Net, DeviceMesh], object]] = {
    "float8 styles": lambda net, mesh: parallelize_module(net, mesh, net_plan(net, True)),
    "a plan": lambda net, mesh: apply_tp_plan(net, mesh, net_plan(net, True)),
    "torch's styles": by_torch,
    "declared": by_hand,
}


@pytest.mark.parametrize(
    ("how", "run", "difference"),
    [
        ("float8 styles", "train", "layer"),
        ("a plan", "evaluate", "recipe"),
        ("torch's styles", "train", "config"),
        ("a plan", "evaluate", "cast"),
        ("declared", "compiled", "layer"),
    ],
)
@on_ranks(2)
def test_tensor_parallel_layers_are_compared_when_placed_or_first_run(
    how: str, run: str, difference: str
) -> None:
    mesh, net = device_mesh(tp=2)["tp"], Net()
    if how == "declared":
        net.layers = nn.ModuleList(LocalMLP(64, 96) for _ in net.layers)
    converted(difference, False, 1, net)

    def use() -> None:
        PARALLELIZE[how](net, mesh)
        RUN[run](net)

    assert NAMED[difference] in raised(ValueError, use)


@on_ranks(2)
def test_histories_are_not_loaded_by_ranks_that_differ() -> None:
    length = 4 + torch.distributed.get_rank()
    config = replace(Float8LinearConfig.from_recipe_name("delayed"), amax_history_len=length)
    net = convert_to_float8_training(Net(), config=config)
    state = net.state_dict()
    by_torch(net, device_mesh(tp=2)["tp"])  # type: ignore[arg-type]
    error = raised(ValueError, lambda: net.load_state_dict(state))
    assert "load_state_dict of layers.0.w1: the ranks of " in error
    assert "layers.0.w1.config.amax_history_len: 4 on rank 0; 5 on rank 1" in error


@contextmanager
def comparisons_counted() -> Iterator[list[int]]:
    """All-reduces of int64 so far, counted where no mode can hide them."""
    count = [0]
    original = torch.distributed.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        count[0] += tensor.dtype is torch.int64
        return original(tensor, *args, **kwargs)

    torch.distributed.all_reduce = counting
    try:
        yield count
    finally:
        torch.distributed.all_reduce = original


@pytest.mark.parametrize(
    ("recipe", "update", "updates_first"),
    [
        ("tensorwise", precompute_float8_dynamic_scale, True),
        ("tensorwise", update_float8_scales, False),
        ("delayed", update_float8_scales, True),
    ],
)
@on_ranks(2, returns=1)
def test_a_model_is_compared_once(
    recipe: str, update: Callable[[nn.Module], object], updates_first: bool
) -> int:
    """Three steps make one comparison in total, counted from the conversion on."""
    with comparisons_counted() as count, comm_audit() as audit:
        world = Distributed(2, 1, config=Float8LinearConfig.from_recipe_name(recipe))
        for step in range(3):
            if step or updates_first:
                update(world.net)
            train(world.net)
    assert all(row.dtype is not torch.int64 for row in audit.rows)
    return count[0]


@pytest.mark.parametrize("runs_first", [True, False])
@on_ranks(4)
def test_stages_of_a_pipeline_may_differ(runs_first: bool) -> None:
    """Pipeline stages have different layers, and their dp axes have no rank in common."""
    mesh = device_mesh(pp=2, dp=2)
    stage = mesh.get_local_rank("pp")
    net = nn.Sequential()
    net.add_module(f"of stage {stage}", nn.Linear(32, 32 + 16 * stage))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, pad_inner_dim=stage == 1)
    convert_to_float8_training(net, config=config)
    fully_shard(net, mesh=mesh["dp"])
    if runs_first:
        net(torch.randn(4, 32))
    update_float8_scales(net)


@on_ranks(2)
def test_a_comparison_that_fails_says_what_it_waited_for() -> None:
    world = Distributed(2, 1)

    def fail(*_: Any) -> None:
        raise RuntimeError("timed out")

    with patch.object(torch.distributed, "all_reduce", fail):
        text = raised(RuntimeError, lambda: update_float8_scales(world.net))
    assert "did not make this call, or has exited: all ranks must make it, on a model that" in text
    assert text.endswith("The communication failed with: timed out")


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@on_ranks(2)
def test_an_update_that_fails_says_what_it_waited_for(recipe: str) -> None:
    world = Distributed(2, 1, config=Float8LinearConfig.from_recipe_name(recipe))
    train(world.net)

    def fail(*_: Any) -> None:
        raise RuntimeError("timed out")

    with patch("fp8_dist.mesh.amax.funcol", SimpleNamespace(all_reduce=fail, wait_tensor=fail)):
        text = raised(RuntimeError, lambda: update_float8_scales(world.net))
    assert text.startswith("the update of scales (attach_update, ")
    assert "another rank did not make this call, or has exited" in text


@on_ranks(2)
def test_ranks_that_compare_different_things_say_so() -> None:
    world = Distributed(2, 1)
    rank = torch.distributed.get_rank()
    calls = [lambda: train(world.net), lambda: set_gradient_transport(world.net, "float8")]
    text = raised(ValueError, calls[rank])
    expected = "FSDP2's first gather on rank 0; set_gradient_transport on rank 1."
    assert f"made different calls: {expected} Make the same calls, in the same order" in text
