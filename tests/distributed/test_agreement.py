"""Ranks that have set up a model in different ways are told what differs, all with one error."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from nets import Distributed, Net, net_plan
from ranks import RankPools, device_mesh
from reference import raised
from torch.distributed.fsdp import fully_shard

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
)
from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import update_float8_scales
from fp8_dist.tensor_parallel import apply_tp_plan


def config_of(difference: str, is_other: bool) -> Float8LinearConfig:
    if difference == "recipe":
        return Float8LinearConfig.from_recipe_name("rowwise" if is_other else "tensorwise")
    power_of_2 = difference == "config" and is_other
    return Float8LinearConfig(
        enable_fsdp_float8_all_gather=True, round_scales_to_power_of_2=power_of_2
    )


def error_of_sharded(dp: int, replicas: int, difference: str, other_rank: int) -> str:
    mesh = device_mesh(replicas=replicas, dp=dp)
    is_other = torch.distributed.get_rank() == other_rank
    left_out = "layers.1.w2" if difference == "layers" and is_other else None
    net = convert_to_float8_training(
        Net(), config=config_of(difference, is_other), module_filter_fn=lambda _, n: n != left_out
    )
    if difference == "frozen" and is_other:
        net.layers[0].w3.weight.requires_grad_(False)  # type: ignore[union-attr,index]
    for module in (*net.layers, net):  # type: ignore[misc,union-attr]
        fully_shard(module, mesh=mesh if replicas > 1 else mesh["dp"])
    return raised(ValueError, lambda: update_float8_scales(net))


@pytest.mark.parametrize("difference", ["config", "recipe", "layers", "frozen"])
def test_all_ranks_are_told_what_differs(ranks: RankPools, difference: str) -> None:
    expected = {
        "config": "layers.0.w1.config.round_scales_to_power_of_2: False on rank 0; True on rank 1",
        "recipe": "layers.0.w1.config.cast_config_input: ",
        "layers": "layers.1.w2: a Float8Linear with a weight of shape [64, 96] on rank 0; missing "
        "on rank 1",
        "frozen": "layers.0.w3.weight.requires_grad: True on rank 0; False on rank 1",
    }
    assert expected[difference] in ranks(2).run_same(error_of_sharded, 2, 1, difference, 1)


def test_one_rank_of_a_mesh_of_several_axes(ranks: RankPools) -> None:
    assert_expected_inline(
        ranks(4).run_same(error_of_sharded, 2, 2, "config", 2),
        """update_float8_scales: the ranks of DeviceMesh((replicas=2, dp=2), 'cpu', stride=(2, 1)) have set up the model in different ways: layers.0.w1.config.round_scales_to_power_of_2: False on ranks 0, 1, 3; True on rank 2. Convert and parallelize it in the same way on all ranks""",
    )


def error_of_plan(difference: str) -> str:
    mesh = device_mesh(tp=2)["tp"]
    is_other = torch.distributed.get_rank() == 1
    net = Net()
    convert_to_float8_training(net, config=config_of(difference, is_other))
    plan = net_plan(net, difference == "plan" and is_other)
    return raised(ValueError, lambda: apply_tp_plan(net, mesh, plan))


@pytest.mark.parametrize("difference", ["config", "recipe", "plan"])
def test_a_plan_is_compared_before_it_is_applied(ranks: RankPools, difference: str) -> None:
    expected = {
        "config": "layers.0.w1.config.round_scales_to_power_of_2: False on rank 0; True on rank 1",
        "recipe": "layers.0.w1.config.cast_config_input: ",
        "plan": "the plan's entry 'layers.0': PrepareFloat8ModuleInput {'input_layouts': "
        "(Replicate(),), ",
    }
    assert expected[difference] in ranks(2).run_same(error_of_plan, difference)


def comparisons(recipe: str, update: str) -> list[int]:
    """All-reduces of int64 in two updates, counted where no mode can hide them."""
    updates: dict[str, Any] = {
        "precompute": precompute_float8_dynamic_scale,
        "sync": sync_float8_amax_and_scale_history,
        "update": update_float8_scales,
    }
    world = Distributed(2, 1, config=Float8LinearConfig.from_recipe_name(recipe))
    dtypes: list[torch.dtype] = []
    original = torch.distributed.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        dtypes.append(tensor.dtype)
        return original(tensor, *args, **kwargs)

    counts = []
    torch.distributed.all_reduce = counting
    try:
        for _ in range(2):
            world.net(world.mine(torch.randn(4, 8, 64))).sum().backward()
            dtypes.clear()
            with comm_audit() as audit:
                updates[update](world.net)
            assert all(row.dtype is not torch.int64 for row in audit.rows)
            counts.append(dtypes.count(torch.int64))
    finally:
        torch.distributed.all_reduce = original
    return counts


@pytest.mark.parametrize(
    ("recipe", "update"),
    [
        ("tensorwise", "precompute"),
        ("tensorwise", "update"),
        ("delayed", "sync"),
        ("delayed", "update"),
        ("rowwise", "update"),
    ],
)
def test_a_model_is_compared_once(ranks: RankPools, recipe: str, update: str) -> None:
    assert ranks(2).run_same(comparisons, recipe, update) == [1, 0]


def stages_with_other_layers() -> list[bool]:
    """Each stage of a pipeline has layers of its own; its axis has no rank in common."""
    mesh = device_mesh(pp=2, dp=2)
    stage = mesh.get_local_rank("pp")
    net = nn.Sequential()
    net.add_module(f"of stage {stage}", nn.Linear(32, 32 + 16 * stage))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, pad_inner_dim=stage == 1)
    convert_to_float8_training(net, config=config)
    fully_shard(net, mesh=mesh["dp"])
    update_float8_scales(net)
    return [True]


def test_stages_of_a_pipeline_may_differ(ranks: RankPools) -> None:
    assert ranks(4).run(stages_with_other_layers) == [[True]] * 4


def told_when_another_rank_stays_away() -> str:
    world = Distributed(2, 1)

    def fail(*_: Any) -> None:
        raise RuntimeError("timed out")

    with patch.object(torch.distributed, "all_reduce", fail):
        return raised(RuntimeError, lambda: update_float8_scales(world.net))


def test_a_comparison_that_fails_says_what_it_waited_for(ranks: RankPools) -> None:
    assert_expected_inline(
        ranks(2).run_same(told_when_another_rank_stays_away),
        """update_float8_scales: another rank of DeviceMesh((dp=2), 'cpu', stride=(1,)) has not called it, or has ended: all of them must. The communication failed with: timed out""",
    )
