"""Delayed scales on many meshes: who takes part in the one all-reduce of a sync."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from delayed_steps import DELAYED, GATHERED, audited_steps
from nets import Net, net_plan, sharded_net
from ranks import RankPools, device_mesh
from reference import same_bits
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fp8_dist import convert_to_float8_training
from fp8_dist import sync_float8_amax_and_scale_history as sync
from fp8_dist.tensor_parallel import PrepareFloat8ModuleInput, apply_tp_plan

TP = pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.full)])


def hybrid(tp: int) -> dict[str, Any]:
    mesh = device_mesh(replicate=2, shard=2, tp=tp)
    net = sharded_net(mesh, GATHERED)
    torch.manual_seed(dist.get_rank() // tp)  # a batch of its own for each data-parallel rank
    return audited_steps(net, torch.randn(2, 8, 64), mesh)


@TP
def test_hybrid_sharding_reduces_over_all_axes(ranks: RankPools, tp: int) -> None:
    results = ranks(4 * tp).run(hybrid, tp)
    for found in results:
        assert found["rows"] == [("all_reduce", "world", found["operands"])]
        assert found["amaxes"] == results[0]["amaxes"]


def stage(tp: int) -> dict[str, Any]:
    """A stage of a pipeline on its own submesh; the stages hold different weights."""
    whole = device_mesh(pp=2, dp=2, tp=tp)
    mesh, number = whole["dp", "tp"], whole.get_local_rank("pp")
    net = sharded_net(mesh, GATHERED, seed=number)
    # The stages need not take the same number of steps.
    return audited_steps(net, torch.randn(2, 8, 64), whole, count=2 + number)


@TP
def test_a_pipeline_stage_reduces_among_its_own_ranks(ranks: RankPools, tp: int) -> None:
    results = ranks(4 * tp).run(stage, tp)
    stages = results[: 2 * tp], results[2 * tp :]
    for found in stages:
        for each in found:
            ((op, axis, elements),) = each["rows"]
            assert (op, elements) == ("all_reduce", each["operands"])
            # (A group of several axes is named by whoever first needed one of its ranks.)
            assert axis in (("dp",) if tp == 1 else ("dp+tp", "shard+tp"))
            assert each["amaxes"] == found[0]["amaxes"]
    assert stages[0][0]["amaxes"] != stages[1][0]["amaxes"]


def several_meshes(also_plain: bool) -> dict[str, Any]:
    """An MLP on dp x tp, one on dp alone, perhaps one on no mesh."""
    mesh = device_mesh(dp=2, tp=2)
    net = convert_to_float8_training(Net(layers=2 + also_plain), config=GATHERED)
    plan = {key: style for key, style in net_plan(net, False).items() if key[:8] == "layers.0"}
    apply_tp_plan(net, mesh["tp"], plan)
    for block in net.layers[:2]:
        fully_shard(block, mesh=mesh["dp"])
    torch.manual_seed(mesh.get_local_rank("dp"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the plain MLP is not gathered by FSDP2
        return audited_steps(net, torch.randn(2, 8, 64), mesh, count=3)


@pytest.mark.parametrize("also_plain", [False, True])
def test_weights_on_several_meshes(ranks: RankPools, also_plain: bool) -> None:
    results = ranks(4).run(several_meshes, also_plain)
    for found in results:
        assert found["rows"] == [("all_reduce", "world", found["operands"])]
        assert found["amaxes"] == results[0]["amaxes"]


def irregular() -> list[Any]:
    """A mesh of ranks in no order that strides could describe."""
    mesh = DeviceMesh("cpu", [0, 2, 3, 1], mesh_dim_names=("dp",))
    net = fully_shard(convert_to_float8_training(Net(), config=GATHERED), mesh=mesh)
    found = audited_steps(net, torch.randn(2, 8, 64), mesh)
    return [found["amaxes"], [op for op, _, _ in found["rows"]]]


def test_one_mesh_may_have_any_ranks(ranks: RankPools) -> None:
    results = ranks(4).run(irregular)
    assert results == [[results[0][0], ["all_reduce"]]] * 4


def prepared_for_plain_weights(shards: bool) -> list[torch.Tensor]:
    """A sequence-parallel input, gathered in float8 for an MLP that is not tensor-parallel."""
    mesh = device_mesh(dp=1, tp=2) if not shards else device_mesh(dp=2, tp=2)
    net = Net(layers=1)
    config = replace(GATHERED if shards else DELAYED, amax_history_len=1)
    convert_to_float8_training(net, config=config)
    style = PrepareFloat8ModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
    )
    block = net.layers[0]
    parallelize_module(block, mesh["tp"], style)
    if shards:
        fully_shard(block, mesh=mesh["dp"])
    outputs = []
    for _ in range(3):
        x = torch.randn(2, 8, 64)
        x[:, 4:] *= 10  # the parts of the two ranks differ
        mine = x.chunk(2, 1)[mesh.get_local_rank("tp")].contiguous()
        output = block(mine)
        output.sum().backward()
        sync(net)
        outputs.append(output)
    return outputs


@pytest.mark.parametrize("shards", [False, True])
def test_an_input_may_be_prepared_for_plain_weights(ranks: RankPools, shards: bool) -> None:
    first, *others = ranks(4 if shards else 2).run(prepared_for_plain_weights, shards)
    for outputs in others:
        assert all(map(same_bits, first, outputs))


def data_parallel() -> list[Any]:
    net = DistributedDataParallel(convert_to_float8_training(Net(), config=DELAYED))
    found = audited_steps(net, torch.randn(2, 8, 64) * (1 + dist.get_rank()), device_mesh(dp=2))
    return [found["rows"], found["amaxes"]]


def test_ranks_of_ddp_have_histories_of_their_own(ranks: RankPools) -> None:
    first, second = ranks(2).run(data_parallel)
    assert first[0] == second[0] == []
    assert first[1] != second[1]
