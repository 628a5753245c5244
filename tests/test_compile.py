"""torch.compile of whole blocks, per block as FSDP2 users do, without graph breaks."""

import pytest
import torch
import torch.nn as nn
from nets import Distributed, full
from ranks import RankPools
from reference import sqnr
from torch._dynamo.utils import counters

from fp8_dist import precompute_float8_dynamic_scale


class Block(nn.Module):
    """What is compiled: the module that holds the one whose inputs are prepared."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def blocks(world: Distributed) -> nn.Sequential:
    return nn.Sequential(*(Block(layer) for layer in world.net.layers))


def compiled_steps(dp: int, tp: int, precompute: bool, backend: str) -> dict[str, float]:
    """SQNR of a compiled model's results against the eager model's, in the second step."""
    torch._dynamo.reset()
    counters.clear()
    found: dict[str, float] = {}
    results: list[dict[str, torch.Tensor]] = []
    whole = torch.randn(4, 8, 64)
    for compiled in (False, True):
        world = Distributed(dp, tp, shard=False)
        model = blocks(world)
        if compiled:
            for block in model:
                block.compile(backend=backend, fullgraph=True)
        world.fully_shard(model, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            if precompute:
                precompute_float8_dynamic_scale(model)
            optimizer.zero_grad()
            leaf = world.mine(whole).requires_grad_()
            output = model(leaf)
            output.square().mean().backward()
            optimizer.step()
        results.append(
            {"output": output.detach(), "grad_input": leaf.grad}
            | {n: full(p.grad) for n, p in model.named_parameters()}
        )
    for name, expected in results[0].items():
        found[name] = sqnr(expected, results[1][name])
    assert sum(counters["graph_break"].values()) == 0
    # One graph serves both blocks, forward and backward, in both steps.
    assert counters["stats"]["unique_graphs"] <= 2
    return found


@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_blocks(ranks: RankPools, dp: int, tp: int, precompute: bool, backend: str) -> None:
    for found in ranks(2).run(compiled_steps, dp, tp, precompute, backend, timeout=180):
        assert min(found.values()) > 120, found


def test_blocks_on_two_axes(ranks: RankPools) -> None:
    for found in ranks(4).run(compiled_steps, 2, 2, True, "aot_eager", timeout=180):
        assert min(found.values()) > 120, found
