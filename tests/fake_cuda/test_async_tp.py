"""Async tensor parallelism: the collectives that torch.compile fuses with float8 GEMMs."""

import pytest
from fake_cuda.async_tp import count_fusions
from fake_cuda.process import FakeCudaProcess


@pytest.mark.full
def test_gathers_and_reduce_scatters_are_fused() -> None:
    """The inputs of wq, wk and wv and of w1 and w3, and the outputs of wo and w2.

    In backward, a reduce-scatter takes the sum of several GEMMs, which no fused operator computes.
    """
    with FakeCudaProcess() as process:  # of its own, because a process has one world
        found = process.run(count_fusions)
    assert found.forward == {"fused gathers": 2, "fused reduce-scatters": 2}
    assert found.backward == {"fused gathers": 2, "reduce-scatters": 2}
    assert found.warnings == []
