"""Async tensor parallelism: the collectives that torch.compile fuses with float8 GEMMs."""

from collections.abc import Iterator

import pytest
from fake_cuda.async_tp import count_fusions
from fake_cuda.process import FakeCudaProcess


@pytest.fixture(scope="module")
def fake_world() -> Iterator[FakeCudaProcess]:
    """A process of its own, because a process has one world."""
    with FakeCudaProcess() as process:
        yield process


@pytest.mark.full
def test_gathers_and_reduce_scatters_are_fused(fake_world: FakeCudaProcess) -> None:
    """The inputs of wq, wk and wv and of w1 and w3, and the outputs of wo and w2.

    In backward the reduce-scatters are of sums of several GEMMs, which no fused operator computes.
    """
    found = fake_world.run(count_fusions, "tensorwise")
    assert found.forward == {"fused gathers": 2, "fused reduce-scatters": 2}
    assert found.backward == {"fused gathers": 2, "reduce-scatters": 2}
    assert found.warnings == []


@pytest.mark.full
def test_other_recipes_say_that_nothing_is_fused(fake_world: FakeCudaProcess) -> None:
    found = fake_world.run(count_fusions, "rowwise_folded")
    assert found.forward == found.backward == {"gathers": 2, "reduce-scatters": 2}
    assert any("one scale per row" in text for text in found.warnings)
