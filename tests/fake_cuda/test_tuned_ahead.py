"""After fp8_dist.tune no step measures block sizes, on one device and on meshes."""

import gc
import io
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from two_level import config_named

from fp8_dist import convert_to_float8_training, float8_layers, tune, update_float8_scales
from fp8_dist.kernels.cuda.triton import launch
from fp8_dist.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, apply_tp_plan
from scripts.common.candidates import OURS
from scripts.common.fake_cuda.device import fake_tensors
from scripts.common.fake_cuda.process import FakeCudaProcess
from scripts.common.fake_cuda.world import meshes

TOKENS = 48


def measured() -> set[tuple[str, Any]]:
    """The kernels and keys for which block sizes were measured in this process."""
    kernels = [each for each in gc.get_objects() if type(each) is launch.Tuned]
    return {(kernel.kernel.__name__, key) for kernel in kernels for key in kernel._fastest}


def forget() -> None:
    for each in gc.get_objects():
        if type(each) is launch.Tuned:
            each._fastest.clear()


# Ranks of FSDP2 and of tensor parallelism, which shards the sequence, too.
PATHS = {"one device": (1, 1), "FSDP2": (8, 1), "TP": (1, 8), "FSDP2 x TP": (2, 4)}


def run(recipe: str, path: str) -> tuple[set[Any], set[Any], list[str]]:
    """What is measured by tune, what by two steps after it, and the lines of its progress."""
    dp, tp = PATHS[path]
    mesh = meshes(dp, tp) if dp * tp > 1 else {}
    forget()
    with fake_tensors():
        with torch.device("cuda"):
            sizes = ((256, 512), (512, 256), (256, 512))
            model = nn.Sequential(*(nn.Linear(*each, bias=False) for each in sizes))
        if dp == 1:
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
        config = config_named(recipe)
        convert_to_float8_training(model, config=config)
        if tp > 1:
            by_rows = Float8ColwiseParallel(input_layouts=Shard(0))
            plan = {"0": by_rows, "1": Float8RowwiseParallel(output_layouts=Shard(0)), "2": by_rows}
            apply_tp_plan(model, mesh["tp"], plan)
        if dp > 1:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
        with redirect_stderr(io.StringIO()) as said:
            tune(model, TOKENS)
        before = measured()
        assert all(parameter.grad is None for parameter in model.parameters())
        for layer in float8_layers(model).values():
            assert all(history.history is None for history in layer.histories.values())
        for _ in range(2):
            x = torch.ones(
                TOKENS // tp, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True
            )
            output = model(x)
            output.backward(torch.ones_like(output))
            update_float8_scales(model)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("fp8_dist.tune")]
    return before, measured() - before, lines


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("recipe", OURS)
def test_steps_measure_nothing_more(recipe: str, path: str, fake_cuda: FakeCudaProcess) -> None:
    before, later, lines = fake_cuda.run(run, recipe, path)
    assert len(before) > 4
    assert later == set()
    part = 512 // PATHS[path][1]
    assert [line.partition(" (")[2] for line in lines] == [f"256 -> {part})", f"{part} -> 256)"]
