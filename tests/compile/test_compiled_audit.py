"""comm_audit lets compiled code be compiled, and records what it communicates."""

from dataclasses import replace

import pytest
import torch
from graphs import Compilations
from nets import Distributed, blocks
from ranks import RankPools
from torch import nn

from fp8_dist import Float8LinearConfig
from fp8_dist.debug import CommAudit, comm_audit
from fp8_dist.debug.communication.table import CommTable


@torch.compile(backend="aot_eager", fullgraph=True, dynamic=False)
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


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_audits_compile_nothing_anew(backend: str) -> None:
    for warm in (False, True):
        compilations = Compilations()
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        if warm:
            compiled(torch.ones(2, 4)).sum().backward()
        for _ in range(10):  # more than torch compiles one function
            with comm_audit():
                compiled(torch.ones(2, 4)).sum().backward()
            compiled(torch.ones(2, 4)).sum().backward()
        assert compilations.graphs == 1


def audited(recipe: str, backend: str | None) -> CommAudit:
    """The second step of blocks under FSDP2 x TP + SP, which makes no graph."""
    compilations = Compilations()
    world = Distributed(2, 2, shard=False, config=Float8LinearConfig.from_recipe_name(recipe))
    model = blocks(world)
    if backend is not None:
        for block in model:
            block.compile(backend=backend, fullgraph=True)
    world.fully_shard(model, model)
    x = world.mine(torch.randn(4, 8, 64)).requires_grad_()
    model(x).sum().backward()
    made = compilations.graphs
    with comm_audit(world.mesh) as audit:
        model(x).sum().backward()
    assert (made > 0, compilations.graphs - made) == (backend is not None, 0)
    return audit


def compared(recipe: str, backend: str) -> list[list[tuple[object, ...]]]:
    """The rows of eager blocks, with what their parts send as their own; those of compiled ones."""
    compiled = audited(recipe, backend)
    by_block = CommTable(
        replace(row, module=row.module.partition(".")[0]) for row in audited(recipe, None).rows
    )
    return [sorted((*row.key, row.elements, row.bytes, row.count) for row in table.rows)
            for table in (by_block, compiled)]  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        ("tensorwise", "aot_eager"),
        ("rowwise_folded", "aot_eager"),
        ("delayed", "eager"),
        pytest.param("tensorwise", "inductor", marks=pytest.mark.full),
        pytest.param("rowwise_folded", "inductor", marks=pytest.mark.full),
    ],
)
def test_compiled_blocks_are_audited_as_eager_ones(
    ranks: RankPools, recipe: str, backend: str
) -> None:
    eager, compiled = ranks(4).run_same(compared, recipe, backend)
    assert [row[:-1] for row in eager] == [row[:-1] for row in compiled]
    # In each block a graph reduces the amaxes of w1's and w3's output gradients one by one.
    more = [mine[-1] - its[-1] for its, mine in zip(eager, compiled, strict=True)]
    assert (sum(more), max(more)) == ((2, 1) if recipe == "tensorwise" else (0, 0))
