"""Pipeline x FSDP2 x TP: stages that wait for each other, and groups that all ranks must make."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from nets import Net, full_state, net_plan, wrong_casts
from ranks import RankPool, device_mesh
from reference import weights_used
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from fp8_dist import Float8LinearConfig, convert_to_float8_training, update_float8_scales
from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import make_amax_group
from fp8_dist.tensor_parallel import apply_tp_plan

STAGES, MICRO_BATCHES = 2, 2


@contextmanager
def groups_as_with_nccl() -> Iterator[list[list[int]]]:
    """Make new groups wait for all ranks, as ncclCommSplit does; yield the groups made."""
    new_group, made = dist.new_group, []

    def waits(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        made.append(list(ranks))
        dist.barrier()
        return new_group(ranks, *args, **kwargs)

    dist.new_group = waits
    try:
        yield made
    finally:
        dist.new_group = new_group


def stage_of(mesh: DeviceMesh, config: Float8LinearConfig | None) -> Net:
    """This rank's stage, under TP and FSDP2; the stages hold different weights."""
    net = Net(seed=mesh.get_local_rank("pp"))
    if config is not None:
        convert_to_float8_training(net, config=config)
        apply_tp_plan(net, mesh["tp"], net_plan(net, False))
    for module in (*net.layers, net):
        fully_shard(module, mesh=mesh["dp"])
    return net


def schedule_of(net: nn.Module, mesh: DeviceMesh) -> ScheduleGPipe:
    rank = mesh.get_local_rank("pp")
    stage = PipelineStage(net, rank, STAGES, torch.device("cpu"), group=mesh["pp"].get_group())
    return ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=lambda output, _: output.square().mean())


def run(schedule: ScheduleGPipe, first: bool) -> None:
    x = torch.randn(4, 8, 64)
    # Without an input, the last stage waits for what the first one sends.
    schedule.step(x) if first else schedule.step(target=torch.zeros(4))


def pipeline(float8_stages: int) -> dict[str, Any]:
    """Groups and reductions of two steps with updates, and wrong casts of a third step."""
    mesh = device_mesh(pp=STAGES, dp=2, tp=2)
    number = mesh.get_local_rank("pp")
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    converted = number < float8_stages
    net = stage_of(mesh, config if converted else None)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    schedule = schedule_of(net, mesh)
    in_steps, in_updates, reductions = [], [], []
    with groups_as_with_nccl() as made:
        if float8_stages < STAGES:
            make_amax_group(mesh["dp", "tp"])
            in_updates.append(made.copy())
        for _ in range(2):
            made.clear()
            run(schedule, number == 0)
            in_steps += made.copy()
            made.clear()
            optimizer.step()
            optimizer.zero_grad()
            with comm_audit(mesh) as audit:
                if converted:
                    update_float8_scales(net)
            in_updates.append(made.copy())
            reductions.append([(row.op, row.axis, row.count) for row in audit.rows])
        masters = full_state(net)
        made.clear()
        with weights_used(net) as used:
            run(schedule, number == 0)
        in_steps += made
    wrong = wrong_casts(used, masters, mesh["tp"])
    return {
        "made in steps": in_steps,
        "made in updates": in_updates,
        "reductions": reductions,
        "wrong": wrong,
    }


@pytest.fixture
def fresh() -> Iterator[RankPool]:
    """Ranks without any group yet."""
    pool = RankPool(8, timeout=150)
    yield pool
    pool.close()


def test_stages_make_their_groups_in_the_first_update(fresh: RankPool) -> None:
    for found in fresh.run(pipeline, STAGES):
        assert found["made in steps"] == []
        assert found["made in updates"] == [[[0, 1, 2, 3], [4, 5, 6, 7]], []]
        assert found["reductions"] == [[("all_reduce", "dp+tp", 1)]] * 2
        assert found["wrong"] == []


def test_a_stage_without_float8(fresh: RankPool) -> None:
    results = fresh.run(pipeline, 1)
    for rank, found in enumerate(results):
        assert found["made in steps"] == []
        assert found["made in updates"] == [[[0, 1, 2, 3], [4, 5, 6, 7]], [], []]
        assert found["reductions"] == [[("all_reduce", "dp+tp", 1)] if rank < 4 else []] * 2
        assert found["wrong"] == []
