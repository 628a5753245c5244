"""Run the calls of scripts.measure.walk, and count the library's own calls in them."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp8_dist
from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    convert_to_float8_training,
    update_float8_scales,
)
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    apply_tp_plan,
)
from scripts.common.markdown import table
from scripts.measure.walk import WALKS

ROOT = str(Path(__file__).resolve().parents[2])
ROOMS = tuple(f"{ROOT}/{room}/" for room in ("fp8_dist", "fsdp", "tensor_parallel"))


class Call(NamedTuple):
    """A call of a function of the library."""

    file: str
    function: str
    depth: int


class Walk(NamedTuple):
    """The calls of the library within one call, in their order."""

    name: str
    calls: list[Call]

    def row(self) -> list[str]:
        """The row of the table."""
        stays = [call.file for call in self.calls]
        stays = [file for i, file in enumerate(stays) if i == 0 or stays[i - 1] != file]
        functions = {(call.file, call.function) for call in self.calls}
        counts = len(self.calls), len(functions), len(set(stays)), len(stays)
        return [self.name, *(f"{count:,}" for count in counts)]


WALKED: list[Walk] = []


@contextmanager
def walk(name: str) -> Iterator[None]:
    """Record the calls of the library in the body of a with statement."""
    calls: list[Call] = []
    depth = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth
        file = os.path.realpath(frame.f_code.co_filename)
        if not file.startswith(ROOMS):
            return
        if event == "call":
            function = frame.f_code.co_qualname
            calls.append(Call(file.removeprefix(f"{ROOT}/"), function, depth))
            depth += 1
        elif event == "return":
            depth -= 1

    assert name in WALKS, name
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        WALKED.append(Walk(name, calls))


def two_layers() -> nn.Sequential:
    """Two linear layers without biases."""
    layers = nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False)
    return nn.Sequential(*layers).to(torch.bfloat16)


def walk_plain(x: torch.Tensor) -> None:
    """A layer on one device."""
    layer = nn.Sequential(nn.Linear(64, 64, bias=False)).to(torch.bfloat16)
    convert_to_float8_training(layer)
    layer(x).sum().backward()
    with walk("plain layer, forward"):
        y = layer(x)
    loss = y.sum()
    with walk("plain layer, backward"):
        loss.backward()


def walk_fsdp(x: torch.Tensor, mesh: DeviceMesh) -> None:
    """Two layers that FSDP2 gathers in float8, and their update."""
    model = two_layers()
    config = Float8LinearConfig.from_recipe_name("tensorwise", enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
        update_float8_scales(model)
    with walk("FSDP2, two layers, forward, casts kept"):
        y = model(x)
    loss = y.sum()
    with walk("FSDP2, two layers, backward"):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with walk("FSDP2, update of two weights"):
        update_float8_scales(model)
    with walk("FSDP2, gather of one weight, cast kept"):
        gather(model[0], mesh)
    step()
    model[0].reshard()
    with walk("FSDP2, gather of one weight, stale"):
        gather(model[0], mesh)


def gather(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Call FSDP2's hook for the inputs of its all-gather."""
    assert isinstance(layer, Float8Linear)
    parameter: Any = layer.float8_weight.master()
    hook = parameter._local_tensor.fsdp_pre_all_gather
    hook(mesh, parameter.size(), parameter.stride(), layer, MixedPrecisionPolicy())


class FeedForward(nn.Module):
    """A gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(64, 128, bias=False)
        self.w3 = nn.Linear(64, 128, bias=False)
        self.w2 = nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.w2(torch.relu(self.w1(x)) * self.w3(x))
        return y


def walk_tensor_parallel(x: torch.Tensor, mesh: DeviceMesh) -> None:
    """A feed-forward with tensor and sequence parallelism."""
    model = nn.Sequential(FeedForward()).to(torch.bfloat16)
    convert_to_float8_training(model)
    plan = {
        "0": PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "0.w1": Float8ColwiseParallel(),
        "0.w3": Float8ColwiseParallel(),
        "0.w2": Float8RowwiseParallel(output_layouts=Shard(1)),
    }
    apply_tp_plan(model, mesh, plan)
    x = x.view(2, 4, 64).requires_grad_()
    model(x).sum().backward()
    with walk("TP and SP feed-forward, forward"):
        y = model(x)
    loss = y.sum()
    with walk("TP and SP feed-forward, backward"):
        loss.backward()


def run(args: argparse.Namespace) -> int:
    """Walk, and print the table, or the calls."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    walk_plain(x)
    walk_fsdp(x, mesh)
    walk_tensor_parallel(x, mesh)
    walked = [each for each in WALKED if args.only in (None, each.name)]
    if args.calls:
        for each in walked:
            print(f"{each.name}:")
            for call in each.calls:
                print(f"{'  ' * call.depth}  {call.file}: {call.function}")
        print()
    print(f"fp8_dist {fp8_dist.__version__}, torch {torch.__version__}\n")
    rows = [each.row() for each in walked]
    print(table(["call", "library calls", "functions", "files", "stays"], rows, "lrrrr"))
    dist.destroy_process_group()
    return 0
