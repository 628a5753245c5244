"""What a CUDA graph would hold: while one is captured, nothing of earlier steps is used."""

from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from fake_cuda.counter import KernelCounter
from fake_cuda.device import FakeCudaMode, fake_tensors
from fake_cuda.layer import LayerShape, layer_on_fake_cuda
from fake_cuda.process import FakeCudaProcess
from fake_cuda.world import meshes
from reference import raised
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp8_dist import Float8LinearConfig, convert_to_float8_training
from fp8_dist.debug import comm_audit

SHAPE = LayerShape(256, 512, 1024)


def capturing(captured: bool) -> AbstractContextManager[object]:
    return patch.object(torch.cuda, "is_current_stream_capturing", lambda: captured)


def launches(name: str) -> list[int]:
    """Kernels of a step with known weight statistics, of two captured steps, and of one after them.

    The weight changes before the second captured step.
    """
    mode = FakeCudaMode()
    layer = layer_on_fake_cuda(name, SHAPE, mode)
    with fake_tensors(mode):
        layer.run()
        counts = []
        for captured, changes in ((False, False), (True, False), (True, True), (False, False)):
            layer.clear()
            if changes:
                layer.change_weight()
            with capturing(captured), KernelCounter() as counter:
                layer.run()
            counts.append(counter.counts.launches)
    return counts


def reductions_of_gathers(recipe: str) -> list[int]:
    """All-reduces of scales where FSDP2 gathers uneven parts; the third gather is captured."""
    mesh, counts = meshes(dp=8)["dp"], []
    config = Float8LinearConfig.from_recipe_name(recipe)
    with fake_tensors():
        model = nn.Sequential(nn.Linear(64, 36, bias=False, device="cuda"))
        convert_to_float8_training(
            model, config=replace(config, enable_fsdp_float8_all_gather=True)
        )
        fully_shard(model, mesh=mesh)
        for captured in (False, False, True, False):
            with capturing(captured), comm_audit(mesh) as audit:
                model.unshard()
                model.reshard()
            counts.append(audit.count("all_reduce"))
    return counts


def refusal_of_delayed_scales() -> str:
    mode = FakeCudaMode()
    layer = layer_on_fake_cuda("delayed", SHAPE, mode)
    with fake_tensors(mode), capturing(True):
        return raised(NotImplementedError, layer.run)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise_folded", "mxfp8"])
def test_a_captured_step_holds_the_cast_of_the_weight(
    fake_cuda: FakeCudaProcess, name: str
) -> None:
    known, captured, captured_new, after = fake_cuda.run(launches, name)
    assert known == captured == captured_new == after


def test_a_captured_gather_finds_the_scales_of_uneven_rows(fake_cuda: FakeCudaProcess) -> None:
    for recipe in ("rowwise_folded", "tensorwise"):
        assert fake_cuda.run(reductions_of_gathers, recipe) == [1, 0, 1, 0]


def test_a_delayed_scale_is_not_captured(fake_cuda: FakeCudaProcess) -> None:
    assert "would replay one step of a DELAYED scale" in fake_cuda.run(refusal_of_delayed_scales)
