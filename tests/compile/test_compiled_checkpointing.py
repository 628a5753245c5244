"""Activation checkpointing in graphs: which ops and collectives run a second time."""

from collections import Counter

import pytest
import torch
from checkpointed import forward
from graphs import OPS, Compilations, Graphs
from nets import Distributed, Net, full
from rank_tests import on_ranks
from reference import same_bits
from two_level import config_named

from fp8_dist import convert_to_float8_training, precompute_float8_dynamic_scale
from fp8_dist.debug import CommRow


@pytest.mark.parametrize(
    ("recipe", "mode"),
    [("delayed", "selective"), ("two levels", "selective"), ("rowwise_folded", "full")],
)
def test_compiled(recipe: str, mode: str) -> None:
    compilations = Compilations()
    net = convert_to_float8_training(Net(layers=1), config=config_named(recipe))
    x, results = torch.randn(2, 4, 64), []
    for run in (forward, torch.compile(forward, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        output = run(net, leaf, mode)
        output.square().sum().backward()
        results.append([output.detach(), leaf.grad, *(p.grad for p in net.parameters())])
        net.zero_grad()
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert (compilations.breaks, compilations.graphs) == (0, 1)


def compiled_counts(mode: str) -> tuple[Counter[str], list[CommRow]]:
    """Ops and collectives in the graphs of a compiled step, which has the bits of eager code."""
    compilations = Compilations()
    results: list[list[torch.Tensor]] = []
    for compiled in (False, True):
        world = Distributed(1, 2, net_arguments={"layers": 1})
        graphs, run = Graphs(world.mesh), forward
        if compiled:
            run = torch.compile(forward, backend=graphs.backend, fullgraph=True)
        precompute_float8_dynamic_scale(world.net)
        x = world.mine(torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(1)))
        output = run(world.net, x.requires_grad_(), mode)
        output.square().sum().backward()
        gradients = [full(p.grad) for p in world.net.parameters()]
        results.append([output.detach(), x.grad, *gradients])
    assert (compilations.breaks, compilations.graphs) == (0, 1)
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    return graphs.ops["forward"] + graphs.ops["backward"], graphs.collectives.rows


@pytest.mark.filterwarnings("ignore")
@on_ranks(2, timeout=180)
def test_graphs_repeat_no_collective_and_no_amax() -> None:
    (plain, collectives), (selective, same_collectives) = map(
        compiled_counts, ("none", "selective")
    )
    assert same_collectives == collectives
    # Only casts are repeated.
    assert {op for op in OPS if plain[op] != selective[op]} == {"quantize"}
