"""The measurement of CPU time: that each candidate's step runs on tensors without memory."""

import pytest

from scripts.common.candidates import BF16, OURS, TORCHAO
from scripts.common.fake_cuda.dispatch import KERNELS_ALONE, seconds_to_dispatch
from scripts.common.fake_cuda.layer import LayerShape
from scripts.common.fake_cuda.process import FakeCudaProcess


@pytest.mark.full
def test_every_candidate_is_timed() -> None:
    names = (BF16, *OURS, *TORCHAO)
    with FakeCudaProcess() as process:  # its device can't have fake tensors afterwards
        seconds = process.run(seconds_to_dispatch, names, LayerShape(32, 64, 48), 1, 2)
    assert tuple(seconds) == (*names, KERNELS_ALONE)
    assert seconds[KERNELS_ALONE][1:] == (None, None)
    # The host can't run a step in less.
    for name in names:
        assert min(each or 0.0 for each in seconds[name]) > 5e-6
    assert seconds[KERNELS_ALONE].eager > 5e-6
