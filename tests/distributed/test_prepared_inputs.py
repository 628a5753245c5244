"""Recorders distinguish inputs that PrepareFloat8ModuleInput casts, also those of one module."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools, device_mesh
from recordings import casts, written
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

from fp8_dist import Float8LinearConfig, convert_to_float8_training
from fp8_dist.debug import float8_stats, record
from fp8_dist.tensor_parallel import Float8ColwiseParallel, PrepareFloat8ModuleInput, apply_tp_plan

Rows = list[Any]
WIDTH = 32


class Gate(nn.Module):
    """Has a prepared input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.g(x)


class Cross(nn.Module):
    """Uses its first two inputs in turn, and in between passes the third to ``gate``."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate = Gate()

    def forward(self, x: torch.Tensor, memory: torch.Tensor, third: torch.Tensor) -> torch.Tensor:
        first = self.k(memory) * self.q(x)
        return first + self.gate(third) + self.v(memory) * self.o(x)


class Net(nn.Module):
    """What is compiled: the module around the one whose inputs are prepared."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.cross = Cross()

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.cross(*inputs)


def batch(part: int) -> list[torch.Tensor]:
    """Three inputs, whose amaxes are far from each other, and the gradient of the output."""
    generator = torch.Generator().manual_seed(part)
    x, memory, third, grad = torch.randn(4, 2, 8, WIDTH, generator=generator)
    return [x, 100 * memory, 1e-3 * third, grad]


# The input of each layer.
SOURCES = {"cross.q": 0, "cross.k": 1, "cross.v": 1, "cross.o": 0, "cross.gate.g": 2}


def parallelized(net: nn.Module) -> None:
    mesh = device_mesh(tp=2)
    prepare = partial(PrepareFloat8ModuleInput, use_local_output=False)
    columns = {f"cross.{name}": Float8ColwiseParallel() for name in ("q", "k", "v", "o", "gate.g")}
    two = prepare(
        input_layouts=(Shard(1), Shard(1), None),
        desired_input_layouts=(Replicate(), Replicate(), None),
    )
    one = prepare(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    apply_tp_plan(net, mesh, {"cross": two, "cross.gate": one, **columns})


def run(net: nn.Module, checkpointed: bool, parts: int, tp: int) -> None:
    rank = torch.distributed.get_rank()
    for part in range(parts):
        *inputs, grad = batch(part)
        if tp > 1:
            inputs = [x.chunk(tp, 1)[rank] for x in inputs]
            grad = grad.chunk(tp, 2)[rank]
        inputs = [x.clone().requires_grad_() for x in inputs]
        run = partial(checkpoint, net, use_reentrant=False) if checkpointed else net
        run(*inputs).backward(grad)


def recorded(recipe: str, compiled: bool, checkpointed: bool, folder: Path) -> tuple[Rows, Rows]:
    """Rows of statistics of a tensor-parallel run, which is recorded too, and of one device."""
    torch._dynamo.reset()
    config = Float8LinearConfig.from_recipe_name(recipe)
    twin, net = (convert_to_float8_training(Net(), config=config) for _ in range(2))
    parallelized(net)
    if compiled:
        net.compile(backend="aot_eager", fullgraph=True)
    mine, its = float8_stats(net), float8_stats(twin)
    recorder = record(net, folder, layers="*")
    for _ in range(2):
        with recorder, mine:
            run(net, checkpointed, 2, tp=2)
        with its:
            run(twin, False, 2, tp=1)
    written(recorder)
    return mine.rows, its.rows


CASES = [
    ("tensorwise", False, True),
    ("rowwise_folded", True, False),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "compiled", "checkpointed"), CASES)
def test_inputs_of_one_width_are_told_apart(
    ranks: RankPools,
    tmp_path: Path,
    recipe: str,
    compiled: bool,
    checkpointed: bool,
) -> None:
    arguments = recipe, compiled, checkpointed, tmp_path
    rows = 2 * 5 * 3 + (2 * 5 if recipe == "rowwise_folded" else 0)
    for mine, its in ranks(2).run(recorded, *arguments, timeout=180):
        assert len(mine) == len(its) == rows
        for row, expected in zip(mine, its, strict=True):
            assert abs(row.sqnr - expected.sqnr) < 0.01, (row, expected)
            assert row.fqn == expected.fqn
            assert (row.amax, row.scale) == (expected.amax, expected.scale)
    inputs = [c for c in casts(tmp_path / "step000001") if c.parts[0]["operand"] == "input"]
    names = [(c.parts[0]["step"], c.parts[0]["call"], c.parts[0]["fqn"]) for c in inputs]
    assert sorted(names) == list(product(range(2), range(2), sorted(SOURCES)))
    for (_, call, fqn), cast in zip(names, inputs, strict=True):
        assert torch.equal(cast.high, batch(call)[SOURCES[fqn]])
