"""comm_audit lets compiled code be compiled, and records what it communicates."""

import warnings

import pytest
import torch
from nets import Distributed, blocks
from ranks import RankPools
from torch import nn
from torch._dynamo.utils import counters

from fp8_dist.debug import comm_audit

BACKENDS = ["eager", "aot_eager", "inductor"]


@torch.compile(fullgraph=True, dynamic=False)
def update(param: torch.Tensor, grad: torch.Tensor, average: torch.Tensor) -> None:
    """Stands for the step of one parameter in torchao's 8-bit optimizers."""
    average.copy_(average.lerp(grad, 0.1))
    param.sub_(0.1 * average)


def test_compiled_code_runs_under_an_audit() -> None:
    param, grad, average = torch.zeros(3), torch.ones(3), torch.zeros(3)
    with comm_audit() as audit:
        update(param, grad, average)
    assert torch.allclose(param, torch.full((3,), -0.01))
    assert audit.rows == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
def test_audits_cost_one_graph_at_most(backend: str, warm: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    if warm:
        compiled(torch.ones(2, 4)).sum().backward()
    for _ in range(10):  # more than torch compiles one function
        with comm_audit():
            compiled(torch.ones(2, 4)).sum().backward()
        compiled(torch.ones(2, 4)).sum().backward()
    assert counters["stats"]["unique_graphs"] <= 2


def collectives(backend: str | None) -> tuple[list[tuple[str, str, int, int]], int]:
    """(op, axis, count, bytes) in one step of blocks under FSDP2 x TP + SP; graphs compiled."""
    torch._dynamo.reset()
    counters.clear()
    world = Distributed(2, 2, shard=False)
    model = blocks(world)
    if backend is not None:
        for block in model:
            block.compile(backend=backend, fullgraph=True)
    world.fully_shard(model, model)
    x = world.mine(torch.randn(4, 8, 64)).requires_grad_()
    audit = comm_audit(world.mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(2):
            if step:
                with audit:
                    model(x).sum().backward()
            else:
                model(x).sum().backward()
    totals: dict[tuple[str, str], list[int]] = {}
    for row in audit.rows:
        total = totals.setdefault((row.op, row.axis), [0, 0])
        total[0] += row.count
        total[1] += row.bytes
    found = [(*key, count, size) for key, (count, size) in sorted(totals.items())]
    return found, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_blocks_communicate_as_eager_ones(ranks: RankPools, backend: str) -> None:
    eager, none = ranks(4).run_same(collectives, None)
    compiled, graphs = ranks(4).run_same(collectives, backend)
    # In each of two blocks a graph reduces the amaxes of w1's and w3's output gradients one by one.
    more = {("all_reduce", "tp"): 2}
    assert compiled == [
        (op, axis, count + more.get((op, axis), 0), size) for op, axis, count, size in eager
    ]
    assert none == 0
    assert graphs > 0
