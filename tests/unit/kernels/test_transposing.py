"""Matrices that are transposed together: when copies are made, and which."""

import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fp8_dist.kernels import TransposedTogether, transposing
from fp8_dist.kernels.transposing import transposed, transposed_copies


class Run(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.call()
        return grad, None


def in_backward(call: Callable[[], None]) -> None:
    Run.apply(torch.ones((), requires_grad=True), call).backward()


class Group:
    """Three matrices, and how many each launch transposed."""

    def __init__(self) -> None:
        self.together = TransposedTogether()
        self.matrices = [torch.zeros(n, 3, dtype=torch.uint8) for n in (2, 4, 5)]
        self.launches: list[int] = []
        self.refill()

    def refill(self) -> None:
        for key, matrix in enumerate(self.matrices):
            matrix.random_()
            self.together.refilled(key, matrix)

    def ask(self, *order: int) -> None:
        for i in order:
            with patch.object(transposing, "transposed_copies", self._counted):
                copy = transposed(self.matrices[i])
            assert torch.equal(copy, self.matrices[i].t())
            assert copy.is_contiguous()

    def _counted(self, first: torch.Tensor, others: list[torch.Tensor]) -> list[torch.Tensor]:
        self.launches.append(1 + len(others))
        return transposed_copies.portable(first, others)

    def backward(self, *order: int) -> list[int]:
        """The launches of a backward that asks in this order."""
        self.launches.clear()
        in_backward(lambda: self.ask(*order))
        assert all(member.copy is None for member in self.together._members.values())
        return list(self.launches)


@pytest.fixture
def group() -> Group:
    """The backward before asked for all matrices."""
    group = Group()
    assert group.backward(0, 1, 2) == [1, 1, 1]
    return group


def test_one_launch_brings_what_the_backward_before_asked_for() -> None:
    group = Group()
    assert group.backward(0, 2) == [1, 1]
    group.refill()
    assert group.backward(0, 2) == [2]
    assert group.backward(2, 0) == [2]  # not gathered again
    group.refill()
    assert group.backward(2, 1, 0) == [2, 1]
    group.refill()
    assert group.backward(1, 0) == [3]
    group.refill()
    assert group.backward(0, 1, 2) == [2, 1]


def test_who_asks_twice_gets_a_copy_of_its_own() -> None:
    group = Group()
    assert group.backward(0, 1, 0) == [1, 1, 1]
    assert group.backward(0, 1, 0) == [2, 1]
    assert group.backward(0, 0, 1) == [2, 1]


def test_a_refill_in_the_middle_of_a_backward_and_what_is_resharded(group: Group) -> None:
    def asks() -> None:
        group.ask(0)
        group.refill()
        group.ask(1, 2, 0)

    group.launches.clear()
    in_backward(asks)
    assert group.launches == [3, 2, 1]
    group.backward(0, 1, 2)
    storage = group.matrices[1].untyped_storage()
    storage.resize_(0)
    assert group.backward(0, 2) == [2]
    storage.resize_(12)
    group.refill()
    assert group.backward(1, 2, 0) == [3]


def test_other_matrices_and_other_memory(group: Group) -> None:
    def asks() -> None:
        part = group.matrices[1][1:]
        assert torch.equal(transposed(part), part.t())

    in_backward(asks)
    assert group.backward(0, 1, 2) == [3]
    group.launches.clear()
    group.ask(0, 1, 2)  # outside of a backward nothing is kept
    assert group.launches == []
    group.matrices[1] = torch.zeros(4, 3, dtype=torch.uint8)
    group.refill()
    assert group.backward(0, 1, 2) == [2, 1]
    assert group.backward(0, 1, 2) == [3]


def test_matrices_outlive_their_group() -> None:
    group = Group()
    group.backward(0, 1)
    matrix = group.matrices[0]
    del group
    gc.collect()
    in_backward(lambda: torch.testing.assert_close(transposed(matrix), matrix.t()))
    assert matrix.untyped_storage()._cdata not in transposing._members


def test_a_backward_that_raises_leaves_nothing_to_the_next(group: Group) -> None:
    def raises() -> None:
        group.ask(0)
        raise KeyError

    with pytest.raises(KeyError):
        in_backward(raises)
    for matrix in group.matrices:
        matrix.random_()  # unseen
    assert group.backward(1, 0, 2) == [2, 1]


def test_copies_belong_to_the_stream_that_made_them(group: Group) -> None:
    def asks() -> None:
        for stream, i in ((0, 0), (1, 1), (1, 1), (1, 2)):  # 1 and 2 were made on the stream of 0
            with patch.object(transposing, "current_stream", lambda device, s=stream: s):
                group.ask(i)

    group.launches.clear()
    in_backward(asks)
    assert group.launches == [3, 1, 1, 1]


def test_many_matrices_take_several_launches() -> None:
    group = Group()
    group.matrices = [torch.zeros(2, 3, dtype=torch.uint8) for _ in range(transposing.MOST + 2)]
    group.refill()
    every = range(len(group.matrices))
    group.backward(*every)
    assert group.backward(*every) == [transposing.MOST, 2]
