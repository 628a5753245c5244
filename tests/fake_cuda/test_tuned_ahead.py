"""After fp8_dist.tune no step measures block sizes, on one device and on meshes."""

import gc
import io
from contextlib import redirect_stderr
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from fake_cuda.device import fake_tensors
from fake_cuda.process import FakeCudaProcess
from fake_cuda.world import meshes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from two_level import config_named

from fp8_dist import (
    convert_to_float8_training,
    float8_layers,
    freeze_to_float8,
    tune,
    update_float8_scales,
)
from fp8_dist.kernels.cuda.triton import launch
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    apply_tp_plan,
    declare_placements,
)
from scripts.common.candidates import OURS

TOKENS = 48


def measured() -> set[tuple[str, Any]]:
    """The kernels and keys for which block sizes were measured in this process."""
    kernels = [each for each in gc.get_objects() if type(each) is launch.Tuned]
    return {(kernel.kernel.__name__, key) for kernel in kernels for key in kernel._fastest}


def forget() -> None:
    for each in gc.get_objects():
        if type(each) is launch.Tuned:
            each._fastest.clear()


class Path(NamedTuple):
    """A way to distribute a model over 8 ranks; tensor parallelism shards the tokens, too."""

    dp: int = 1
    tp: int = 1
    stored: bool = False  # in float8, before it is distributed
    declared: bool = False  # plain local tensors


PATHS = {
    "one device": Path(),
    "FSDP2": Path(dp=8),
    "TP": Path(tp=8),
    "TP, stored": Path(tp=8, stored=True),
    "TP, declared": Path(tp=8, declared=True),
    "FSDP2 x TP": Path(dp=2, tp=4),
}
FEATURES, HIDDEN, LAST = 256, 1024, 512
SEVERAL_SCALES = ("rowwise", "rowwise_with_gw_hp")  # of a weight, which can't be stored then


def net(recipe: str, path: Path, mesh: dict[str, DeviceMesh]) -> nn.Module:
    """Layers, of which the last is like the second."""
    hidden = HIDDEN // path.tp if path.declared else HIDDEN
    with torch.device("cuda"):
        sizes = ((FEATURES, hidden), (hidden, LAST), (LAST, hidden), (hidden, LAST))
        model = nn.Sequential(*(nn.Linear(*each, bias=False) for each in sizes))
    if path.dp == 1:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    convert_to_float8_training(model, config=config_named(recipe))
    if path.stored:
        freeze_to_float8(model.requires_grad_(False))
    if path.declared:
        for layer in float8_layers(model).values():
            dim = int(layer.out_features == LAST)
            own = {"weight": Shard(dim), "input": Shard(dim), "output": Shard(1 - dim)}
            declare_placements(layer, mesh["tp"], **own)
    elif path.tp > 1:
        by_rows = Float8ColwiseParallel(input_layouts=Shard(0))
        by_columns = Float8RowwiseParallel(output_layouts=Shard(0))
        plan = {"0": by_rows, "1": by_columns, "2": by_rows, "3": by_columns}
        apply_tp_plan(model, mesh["tp"], plan)
    if path.dp > 1:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    return model


def run(recipe: str, path: Path) -> tuple[set[Any], set[Any], list[str]]:
    """What is measured by tune, what by two steps after it, and the lines of its progress."""
    mesh = meshes(path.dp, path.tp) if path.dp * path.tp > 1 else {}
    forget()
    with fake_tensors():
        model = net(recipe, path, mesh)
        with redirect_stderr(io.StringIO()) as said:
            tune(model, TOKENS)
        before = measured()
        assert all(parameter.grad is None for parameter in model.parameters())
        for layer in float8_layers(model).values():
            assert all(history.history is None for history in layer.histories.values())
        shape = TOKENS // path.tp, FEATURES
        for _ in range(2):
            x = torch.ones(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            output = model(x)
            output.backward(torch.ones_like(output))
            update_float8_scales(model)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("fp8_dist.tune")]
    return before, measured() - before, lines


@pytest.mark.parametrize(
    ("recipe", "path"),
    [
        (recipe, path)
        for recipe, path in product(OURS, PATHS)
        if not (PATHS[path].stored and recipe in SEVERAL_SCALES)
    ],
)
def test_steps_measure_nothing_more(recipe: str, path: str, fake_cuda: FakeCudaProcess) -> None:
    before, later, lines = fake_cuda.run(run, recipe, PATHS[path])
    assert len(before) > 4
    assert later == set()
    part = HIDDEN // PATHS[path].tp
    found = [line.partition(" (")[2] for line in lines]
    assert found == [f"256 -> {part})", f"{part} -> 512)", f"512 -> {part})"]
