"""The pool of ranks that other tests use: results, failures, hangs, recovery."""

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, RankPool, RankPools, device_mesh


def reduced(value: float) -> tuple[int, torch.Tensor]:
    total = torch.full((2,), value + dist.get_rank())
    dist.all_reduce(total, group=device_mesh(dp=2).get_group())
    return dist.get_rank(), total


def process_id() -> int:
    return os.getpid()


def draw() -> torch.Tensor:
    os.environ["LEFT_BEHIND"] = "1"
    return torch.rand(3, requires_grad=True).to(torch.float8_e4m3fn)


def left_behind() -> str | None:
    return os.environ.get("LEFT_BEHIND")


def fails_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("only here")


def hangs_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def test_results_come_by_rank_from_ranks_that_stay_alive(ranks: RankPools) -> None:
    first, second = ranks(2).run(reduced, value=1.0)
    assert (first[0], second[0]) == (0, 1)
    assert torch.equal(first[1], torch.tensor([3.0, 3.0]))
    assert torch.equal(second[1], torch.tensor([3.0, 3.0]))
    assert ranks(2) is ranks(2)
    assert ranks(2).run(process_id) == ranks(2).run(process_id)


def test_every_task_starts_from_the_same_state(ranks: RankPools) -> None:
    first, second = ranks(2).run(draw), ranks(2).run(draw)
    assert first[0].dtype == torch.float8_e4m3fn
    assert not first[0].requires_grad
    for tensor in (*first, *second):
        assert torch.equal(tensor.float(), first[0].float())
    assert ranks(2).run(left_behind) == [None, None]


@pytest.fixture(scope="module")
def spoilt() -> Iterator[RankPool]:
    """A separate pool for tests that fail on purpose: after each, the ranks start again."""
    pool = RankPool(2)
    yield pool
    pool.close()


def test_an_error_on_one_rank_has_its_traceback_and_a_new_pool_follows(spoilt: RankPool) -> None:
    before = spoilt.run(process_id)
    with pytest.raises(RankError) as error:
        spoilt.run(fails_on_rank_1)
    assert str(error.value).startswith("failed on rank 1 of 2\n--- rank 1 ---\nTraceback")
    assert "in fails_on_rank_1" in str(error.value)
    assert str(error.value).endswith("ValueError: only here")
    assert set(spoilt.run(process_id)).isdisjoint(before)


def test_a_hang_ends_and_names_the_rank_and_the_place(spoilt: RankPool) -> None:
    spoilt.run(process_id)  # the ranks import this module here, not within the timeout
    with pytest.raises(RankError) as error:
        spoilt.run(hangs_on_rank_1, timeout=2.0)
    assert str(error.value).startswith("no answer from rank 1 of 2 after ")
    assert "in hangs_on_rank_1" in str(error.value)
