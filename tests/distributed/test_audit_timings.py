"""``comm_audit(timings=True)``: how long collectives take, from torch's profiler."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from nets import Distributed
from ranks import RankPools
from torch.profiler import ProfilerActivity, profile

from fp8_dist import Float8LinearConfig
from fp8_dist.debug import comm_audit

funcol = torch.ops._c10d_functional
SLOW_S = 1.0


def numbers_masked(table: str) -> str:
    """Milliseconds, which have three decimals, as MS; columns apart by a space."""
    return re.sub(r" +", " ", re.sub(r"[\d,]+\.\d{3}\b", "MS", table))


def a_step(recipe: str) -> None:
    world = Distributed(2, 2, config=Float8LinearConfig.from_recipe_name(recipe))
    x = world.mine(torch.randn(4, 8, 64)).requires_grad_()
    world.net(x).sum().backward()
    audit = comm_audit(world.mesh, timings=True)
    with audit:
        world.net(x).sum().backward()
        time.sleep(0.1)  # gloo may still be ending an event
    seconds = [row.seconds for row in audit.rows if not row.in_mixed_gather]
    assert all(each is not None and each > 0 for each in seconds)
    assert all(row.seconds is None for row in audit.rows if row.in_mixed_gather)
    total = re.findall(r"[\d,]+\.\d{3}", audit.table())[-1].replace(",", "")
    assert float(total) == pytest.approx(1e3 * sum(filter(None, seconds)), abs=0.01)


def test_every_collective_of_a_step_has_a_time(ranks: RankPools) -> None:
    for recipe in ("tensorwise", "rowwise_folded"):
        ranks(4).run(a_step, recipe)


def one_rank_is_late() -> dict[str, float | None]:
    """Runs on every rank: seconds by kind; rank 1 joins the broadcast late."""
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    store = dist.distributed_c10d._get_default_store()
    with comm_audit(timings=True) as audit:
        dist.all_reduce(torch.ones(3))
        if rank == 0:
            work = dist.broadcast(torch.ones(4), 1, async_op=True)
            store.set("issued", "")
        else:
            store.wait(["issued"])
            time.sleep(SLOW_S)
            work = dist.broadcast(torch.ones(4), 1, async_op=True)
        # Waits in the queue behind the broadcast.
        gathered = funcol.all_gather_into_tensor(torch.ones(5), 2, group)
        funcol.wait_tensor(gathered)
        work.wait()
        time.sleep(0.1)
    return {row.op: row.seconds for row in audit.rows}


def test_waiting_for_another_rank_counts_and_a_queue_does_not(ranks: RankPools) -> None:
    first, second = ranks(2).run(one_rank_is_late)
    assert first["broadcast"] > SLOW_S / 2
    assert first["broadcast"] == max(first.values())
    assert first["all_gather"] < SLOW_S / 2
    assert second.keys() == {"all_reduce", "broadcast", "all_gather"}
    assert None not in second.values()


def one_is_in_flight_when_the_block_ends() -> tuple[str, int]:
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    audit = comm_audit(timings=True)
    with audit:
        dist.all_reduce(torch.ones(3))
        time.sleep(0.1)  # gloo may still be ending its event
        if rank == 0:
            work = dist.broadcast(torch.ones(4), 1, async_op=True)
    store.set(f"left {rank}", "")
    store.wait(["left 0"])
    if rank == 1:
        work = dist.broadcast(torch.ones(4), 1, async_op=True)
    work.wait()
    table = numbers_masked(audit.table())
    with audit:  # a later block adds to it
        dist.all_reduce(torch.ones(3))
        time.sleep(0.1)
    (row,) = (row for row in audit.rows if row.op == "all_reduce")
    return table, row.count if row.seconds else 0


def test_a_duration_that_is_not_known_is_none(ranks: RankPools) -> None:
    (table, count), (_, other) = ranks(2).run(one_is_in_flight_when_the_block_ends)
    assert count == other == 2
    assert_expected_inline(
        table,
        """\
op axis dtype count elements bytes ms
all_reduce world float32 1 3 12 MS
broadcast world float32 1 4 16 -
total 2 28 MS
 float8 0
 other 28""",
    )


def inside_of_a_profiler() -> None:
    audit, refused = comm_audit(timings=True), "uses torch.profiler, which is already active"
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises(RuntimeError, match=refused):
            audit.__enter__()
        with comm_audit() as untimed:
            dist.all_reduce(torch.ones(3))
    assert [row.seconds for row in untimed.rows] == [None]
    assert any(event.name == "gloo:all_reduce" for event in profiler.events())
    with audit:
        with pytest.raises(RuntimeError, match=refused):
            comm_audit(timings=True).__enter__()
        dist.all_reduce(torch.ones(3))
        time.sleep(0.1)
    assert [row.op for row in audit.rows if row.seconds] == ["all_reduce"]


def test_there_is_one_profiler_at_a_time(ranks: RankPools) -> None:
    ranks(2).run(inside_of_a_profiler)
