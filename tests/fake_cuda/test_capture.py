"""What a CUDA graph would hold: while one is captured, nothing of earlier steps is used."""

from unittest.mock import patch

import pytest
import torch
from reference import raised

from scripts.common.candidates import OURS
from scripts.common.fake_cuda.counter import KernelCounter
from scripts.common.fake_cuda.device import FakeCudaMode, fake_tensors
from scripts.common.fake_cuda.layer import LayerShape, layer_on_fake_cuda
from scripts.common.fake_cuda.process import FakeCudaProcess

SHAPE = LayerShape(256, 512, 1024)


def launches(name: str) -> list[int]:
    """Kernels of a step with a known weight, of two that are captured, and of one after them.

    The weight of the first capture is known, that of the second is new.
    """
    mode = FakeCudaMode()
    layer = layer_on_fake_cuda(name, SHAPE, mode)
    with fake_tensors(mode):
        layer.run()
        counts = []
        for capturing, changes in ((False, False), (True, False), (True, True), (False, False)):
            layer.clear()
            if changes:
                layer.change_weight()
            capture = patch.object(torch.cuda, "is_current_stream_capturing", lambda c=capturing: c)
            with capture, KernelCounter() as counter:
                layer.run()
            counts.append(counter.counts.launches)
    return counts


def refusal_of_delayed_scales() -> str:
    mode = FakeCudaMode()
    layer = layer_on_fake_cuda("delayed", SHAPE, mode)
    capture = patch.object(torch.cuda, "is_current_stream_capturing", lambda: True)
    with fake_tensors(mode), capture:
        return raised(NotImplementedError, layer.run)


@pytest.mark.parametrize("name", [name for name in OURS if name != "delayed"])
def test_a_captured_step_holds_the_cast_of_the_weight(
    fake_cuda: FakeCudaProcess, name: str
) -> None:
    known, captured, captured_new, after = fake_cuda.run(launches, name)
    assert captured == captured_new > known
    # A graph's copies are not kept: the next step casts the weight.
    assert after > known


def test_a_delayed_scale_is_not_captured(fake_cuda: FakeCudaProcess) -> None:
    assert "would replay one step of a DELAYED scale" in fake_cuda.run(refusal_of_delayed_scales)
