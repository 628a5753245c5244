"""Delayed scales on meshes: one all-reduce per step, the passes that count, one device's histories."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from delayed_steps import DELAYED, DRY_RUNS, GATHERED, amaxes, audited_steps, histories, recorded
from nets import Distributed, Net, full, net_plan, sharded_net
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import same_bits
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from fp8_dist import (
    CastConfig,
    Float8LinearConfig,
    ScalingType,
    attach_update,
    convert_to_float8_training,
)
from fp8_dist import sync_float8_amax_and_scale_history as sync
from fp8_dist.debug import comm_audit
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    PrepareFloat8ModuleInput,
    apply_tp_plan,
    share_input,
)


def hybrid() -> dict[str, Any]:
    mesh = device_mesh(replicate=2, shard=2, tp=1)
    net = sharded_net(mesh, GATHERED)
    torch.manual_seed(dist.get_rank())  # a batch of its own for each data-parallel rank
    return audited_steps(net, torch.randn(2, 8, 64), mesh)


def test_hybrid_sharding_reduces_over_all_axes(ranks: RankPools) -> None:
    found = ranks(4).run_same(hybrid)
    assert found["rows"] == [("all_reduce", "world", found["operands"])]


def stage() -> dict[str, Any]:
    """A stage of a pipeline on its own submesh; the stages hold different weights."""
    whole = device_mesh(pp=2, dp=2, tp=1)
    mesh, number = whole["dp", "tp"], whole.get_local_rank("pp")
    net = sharded_net(mesh, GATHERED, seed=number)
    # The stages need not take the same number of steps.
    return audited_steps(net, torch.randn(2, 8, 64), whole, count=2 + number)


def test_a_pipeline_stage_reduces_among_its_own_ranks(ranks: RankPools) -> None:
    results = ranks(4).run(stage)
    stages = results[:2], results[2:]
    for found in stages:
        for each in found:
            ((op, axis, elements),) = each["rows"]
            assert (op, elements) == ("all_reduce", each["operands"])
            assert axis == "dp"
            assert each["amaxes"] == found[0]["amaxes"]
    assert stages[0][0]["amaxes"] != stages[1][0]["amaxes"]


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


INT32 = torch.int32  # an amax travels as the bits of a non-negative float


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2)])
@on_ranks("dp", "tp")
def test_histories_are_those_of_one_device(dp: int, tp: int) -> None:
    # One MLP: the next one's input has other bits, if sums are taken in another order.
    world = Distributed(dp, tp, config=DELAYED, net_arguments={"layers": 1})
    for step in range(3):
        x, grad = (torch.randn(4, 8, 64) * (step + 1) for _ in range(2))
        world.net(world.mine(x).requires_grad_()).backward(world.mine(grad))
        # Dynamic scales cover the batch of one data-parallel rank, delayed scales all batches.
        parts = 1 if step else dp
        for x_part, grad_part in zip(x.chunk(parts), grad.chunk(parts), strict=True):
            world.twin(x_part.requires_grad_()).backward(grad_part)
        for net in (world.net, world.twin):
            sync(net)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(1.5)
    found = {
        name.replace("prepared_input", "input"): h for name, h in amaxes(world.net).items() if h
    }
    expected = amaxes(world.twin)
    assert found == {name: expected[name] for name in found}
    assert len(found) == (9 if tp == 1 else 8)  # one for w1 and w3 where TP prepares it


@on_ranks(4)
def test_no_amax_travels_after_the_first_step() -> None:
    world = Distributed(2, 2, config=DELAYED)
    optimizer = torch.optim.AdamW(world.net.parameters())
    reduces = []
    for _ in range(3):
        with comm_audit(world.mesh) as step:
            for _ in range(2):
                world.net(world.mine(torch.randn(4, 8, 64))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with comm_audit(world.mesh) as end:
            sync(world.net)
        reduces.append(step.count("all_reduce", dtype=INT32))
        assert end.count() == end.count("all_reduce", dtype=INT32) == 1
        assert sum(row.elements for row in end.rows) == len(histories(world.net))
    gathered = Counter[str]()
    for row in step.rows:
        gathered[f"{row.dtype} over {row.axis}"] += row.bytes * (row.op == "all_gather")
    first, *others = reduces
    assert first > sum(others) == 0
    assert +gathered == {
        "torch.float8_e4m3fn over dp": 73_728,
        "torch.float32 over dp": 3_584,
        "torch.float8_e4m3fn over tp": 4_096,
        "torch.float8_e5m2 over tp": 4_096,
    }


@pytest.mark.parametrize("where", ["input", "weight"])
@on_ranks(4)
def test_a_nan_on_one_rank(where: str) -> None:
    """On rank 0 alone, in a step whose scales come from the history."""
    world = Distributed(2, 2, config=DELAYED)
    x = world.mine(torch.randn(4, 8, 64))
    for _ in range(2):
        world.net(x).square().mean().backward()
        sync(world.net)
    before = amaxes(world.net)
    with torch.no_grad():
        spoiled = x if where == "input" else world.net.layers[0].w1.weight.to_local()
        if dist.get_rank() == 0:
            spoiled.view(-1)[0] = torch.nan
    world.net.zero_grad()
    output = world.net(x)
    output.square().mean().backward()
    with torch.no_grad():
        if dist.get_rank() == 0 and where == "weight":
            spoiled.view(-1)[0] = 0.0
    sync(world.net)
    after = amaxes(world.net)
    # Data-parallel ranks have inputs of their own, and share weights and their gradients.
    assert output.isnan().any() == (where == "weight" or dist.get_rank() < 2)
    assert all(full(p.grad).isnan().any() for p in world.net.parameters())
    assert all(max(after[n]) == max(v) for n, v in before.items() if v)
    assert world.net(x.nan_to_num()).isfinite().all()


# Passes that count: those of a step, even if FSDP2 or a pipeline accumulates their gradients.


@pytest.mark.parametrize(
    ("sizes", "gathers"),
    [
        ({"dp": 2}, True),
        ({"dp": 2}, False),
        ({"replicate": 2, "shard": 2}, True),
        ({"dp": 2, "tp": 2}, True),
    ],
    ids=["FSDP2", "gathers in high precision", "HSDP", "FSDP2 x TP"],
)
@on_ranks("sizes")
def test_fsdp_holds_gradients_of_micro_batches(sizes: dict[str, int], gathers: bool) -> None:
    """The input of the first layer records both micro-batches, and no dry run."""
    mesh = device_mesh(**sizes)
    config = GATHERED if gathers else Float8LinearConfig.from_recipe_name("delayed")
    net = convert_to_float8_training(Net(layers=1), config=config)
    if "tp" in sizes:
        apply_tp_plan(net, mesh["tp"], net_plan(net, False))
    data = tuple(name for name in sizes if name != "tp")
    param_dtype = None if "tp" in sizes else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype, torch.float32)
    for module in (*net.layers, net):
        fully_shard(module, mesh=mesh[data], mp_policy=policy)
    reduces: Any = net.set_requires_all_reduce if len(data) > 1 else net.set_requires_gradient_sync
    name = "layers.0.w1.prepared_input" if "tp" in sizes else "layers.0.w1.input"
    torch.manual_seed(dist.get_rank() // sizes.get("tp", 1))
    for _ in range(2):
        for kind in DRY_RUNS:
            kind(net, net, torch.full((2, 4, 64), 1e10, requires_grad=True))
        x = torch.randn(2, 4, 64)
        for factor in (8.0, 1.0):
            reduces(factor == 1.0)
            net((x * factor).requires_grad_()).square().mean().backward()
        largest = (x * 8).to(param_dtype).abs().max()
        assert recorded(net)[name] == largest.item()
        net.zero_grad()
        for history in histories(net).values():
            history.current = None


def stage_model(number: int, recipe: str, frozen: bool) -> nn.Module:
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    if frozen:
        model[2].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("recipe", "schedule", "frozen"),
    [
        ("rowwise_folded", Schedule1F1B, False),
        ("delayed", Schedule1F1B, True),
        ("delayed", ScheduleGPipe, False),
    ],
)
@on_ranks(2, returns=[])
def test_gradients_of_a_pipeline_are_those_of_one_device(
    recipe: str, schedule: Any, frozen: bool
) -> list[str]:
    """Names of gradients that differ from those of the same stages on one device.

    torch infers the shapes by passes over uninitialized memory, which holds large numbers here.
    """
    rank = dist.get_rank()
    mine, *twins = (stage_model(i, recipe, frozen) for i in (rank, 0, 1))
    optimizers, differ = [], []
    for model in (mine, *twins):
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
        attach_update(optimizers[-1], model)
    junk = [torch.full((4, 64), 1e20) for _ in range(64)]
    del junk
    run = schedule(PipelineStage(mine, rank, 2, torch.device("cpu")), 4, loss_fn=F.mse_loss)
    for step in range(3):
        torch.manual_seed(100 + step)
        x, target = torch.randn(16, 64), torch.randn(16, 64)
        run.step(x) if rank == 0 else run.step(target=target)
        for part, expected in zip(x.chunk(4), target.chunk(4), strict=True):
            (F.mse_loss(twins[1](twins[0](part)), expected) / 4).backward()
        gradients = [{n: p.grad for n, p in m.named_parameters()} for m in (mine, twins[rank])]
        assert [name for name, grad in gradients[0].items() if grad is None] == [
            "2.weight"
        ] * frozen
        for name, grad in gradients[0].items():
            if grad is not None and not (same_bits(grad, gradients[1][name]) and grad.any()):
                differ.append(f"step {step}: {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return differ


@on_ranks(2)
def test_a_gathered_weight_that_the_backward_alone_casts_is_recorded() -> None:
    off, cast = CastConfig(ScalingType.DISABLED), CastConfig(ScalingType.DELAYED)
    config = Float8LinearConfig(
        cast_config_input=off,
        cast_config_weight=off,
        cast_config_weight_for_grad_input=cast,
        cast_config_input_for_grad_weight=CastConfig(),
    )
    layer = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32, bias=False)), config=config)
    fully_shard(layer, mesh=device_mesh(dp=2))
    layer(torch.randn(16, 32, requires_grad=True)).sum().backward()
    sync(layer)
    assert max(amaxes(layer)["0.weight"]) == full(layer[0].weight).abs().max()


class Pair(nn.Module):
    """Two layers with an input each; or, with ``joins``, with shared inputs put together."""

    def __init__(self, joins: bool) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.joins = joins

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.joins:
            shared = [share_input(each, [self.q, self.k]) for each in (x, y)]
            x = y = torch.cat(shared)
        return self.q(x) + self.k(y)


@pytest.mark.parametrize("case", ["joined", "frozen"])
@on_ranks(2)
def test_inputs_that_share_a_history_have_the_largest_amax(case: str) -> None:
    net, mesh = nn.Sequential(Pair(case == "joined")), device_mesh(tp=2)
    convert_to_float8_training(net, config=DELAYED)
    plan: dict[str, Any] = {f"0.{name}": Float8ColwiseParallel() for name in "qk"}
    if case == "frozen":
        plan["0"] = PrepareFloat8ModuleInput(
            input_layouts=(Shard(1),) * 2, desired_input_layouts=(Replicate(),) * 2
        )
        net[0].k.weight.requires_grad_(False)
    apply_tp_plan(net, mesh, plan)
    for largest in ((3, 3), (2, 4)):
        inputs = [amax * torch.ones(2, 8, 32) for amax in largest]
        if case == "joined":
            inputs = [DTensor.from_local(x, mesh, (Shard(1),)) for x in inputs]
        net[0](*inputs).sum().backward()
        sync(net)
        net.zero_grad()
    name = "input" if case == "joined" else "prepared_input"
    assert amaxes(net)[f"0.q.{name}"] == [4, 3]
