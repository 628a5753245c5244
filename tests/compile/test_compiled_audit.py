"""comm_audit lets compiled code be compiled, and records what it communicates."""

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from nets import Distributed, blocks
from ranks import RankPools
from torch import nn
from torch._dynamo.utils import counters

from fp8_dist import Float8LinearConfig
from fp8_dist.debug import CommAudit, CommRow, comm_audit
from fp8_dist.debug.communication.table import CommTable

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
def test_audits_compile_nothing_anew(backend: str, warm: bool) -> None:
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
    assert counters["stats"]["unique_graphs"] == 1


def audited(recipe: str, backend: str | None) -> tuple[CommAudit, int]:
    """The second step of blocks under FSDP2 x TP + SP, and how many graphs it made."""
    torch._dynamo.reset()
    config = Float8LinearConfig.from_recipe_name(recipe)
    world = Distributed(2, 2, shard=False, config=config)
    model = blocks(world)
    if backend is not None:
        for block in model:
            block.compile(backend=backend, fullgraph=True)
    world.fully_shard(model, model)
    x = world.mine(torch.randn(4, 8, 64)).requires_grad_()
    counters.clear()
    model(x).sum().backward()
    assert (counters["stats"]["unique_graphs"] > 0) == (backend is not None)
    counters.clear()
    with comm_audit(world.mesh) as audit:
        model(x).sum().backward()
    return audit, counters["stats"]["unique_graphs"]


def by_block(rows: list[CommRow]) -> CommTable:
    """The rows, with what a block's parts send as its own."""
    return CommTable(replace(row, module=row.module.partition(".")[0]) for row in rows)


def compared(recipe: str, backend: str) -> tuple[str, str, int]:
    """Runs on every rank: the table of eager blocks, that of compiled ones, and graphs made."""
    eager, _ = audited(recipe, None)
    compiled, graphs = audited(recipe, backend)
    return by_block(eager.rows).table(by_module=True), compiled.table(by_module=True), graphs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", ["delayed", "rowwise_folded"])
def test_compiled_blocks_are_audited_as_eager_ones(
    ranks: RankPools, recipe: str, backend: str
) -> None:
    eager, compiled, graphs = ranks(4).run_same(compared, recipe, backend)
    assert sorted(compiled.splitlines()) == sorted(eager.splitlines())
    assert graphs == 0


def test_a_table_of_compiled_blocks(ranks: RankPools) -> None:
    eager, compiled, graphs = ranks(4).run_same(compared, "tensorwise", "inductor")
    assert_expected_inline(
        compiled,
        """\
op              axis  dtype          count  elements    bytes  module
all_gather      dp    float8_e4m3fn      1     9,216    9,216  0
all_gather      dp    float32            +       112      448  0
all_reduce      tp    int32              5         5       20  0
all_gather      tp    float8_e4m3fn      1     1,024    1,024  0
reduce_scatter  tp    float32            2     2,048    8,192  0
all_gather      dp    float8_e4m3fn      3    27,648   27,648  1
all_gather      dp    float32            +       336    1,344  1
all_reduce      tp    int32              5         5       20  1
all_gather      tp    float8_e4m3fn      1     1,024    1,024  1
reduce_scatter  tp    float32            2     2,048    8,192  1
all_reduce      tp    float32            1        64      256  1
all_gather      tp    float8_e5m2        1     1,024    1,024  1
reduce_scatter  dp    float32            1     9,328   37,312  1
all_reduce      tp    float32            1        64      256  0
all_gather      tp    float8_e5m2        1     1,024    1,024  0
reduce_scatter  dp    float32            1     9,328   37,312  0
total                                   26            134,312
  float8                                               40,960
  other                                                93,352""",
    )
    assert graphs == 0
    # In each block a graph reduces the amaxes of w1's and w3's output gradients one by one.
    differs = [line for line in eager.splitlines() if line not in compiled.splitlines()]
    assert_expected_inline(
        "\n".join(differs),
        """\
all_reduce      tp    int32              4         5       20  0
all_reduce      tp    int32              4         5       20  1
total                                   24            134,312""",
    )
