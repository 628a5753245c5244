"""Activation checkpointing in graphs: what is computed and communicated a second time."""

from collections import Counter

import pytest
import torch
from checkpointed import Checkpointed, forward
from graphs import OPS, Compilations, Graphs
from nets import Distributed, Net, full
from ranks import RankPools
from reference import same_bits
from torch import nn
from two_level import config_named

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)
from fp8_dist.debug import CommRow, comm_audit

full_tier = pytest.mark.full


@pytest.mark.parametrize(
    ("recipe", "mode"),
    [
        *((recipe, "selective") for recipe in ("tensorwise", "rowwise_folded", "delayed")),
        ("rowwise_folded", "full"),
        ("two levels", "selective"),
    ],
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


def compiled_counts(recipe: str, mode: str) -> tuple[Counter[str], list[CommRow]]:
    """Ops and collectives in the graphs of a compiled step, which has the bits of an eager one."""
    compilations = Compilations()
    results: list[list[torch.Tensor]] = []
    for compiled in (False, True):
        world = Distributed(
            1, 2, config=Float8LinearConfig.from_recipe_name(recipe), net_arguments={"layers": 1}
        )
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
def test_graphs_repeat_no_collective_and_no_amax(ranks: RankPools) -> None:
    (plain, collectives), (selective, same_collectives) = (
        ranks(2).run(compiled_counts, "tensorwise", mode, timeout=180)[0]
        for mode in ("none", "selective")
    )
    assert same_collectives == collectives
    # Casts are repeated, and nothing else.
    assert {op for op in OPS if plain[op] != selective[op]} == {"quantize"}


def inside_of_fsdp(mode: str, compiled: bool) -> tuple[str, int]:
    """The collectives of a step whose weights FSDP2 gathers in high precision, twice.

    And how many of them reduce amaxes.
    """
    config = Float8LinearConfig.from_recipe_name("rowwise")
    world = Distributed(2, 2, shard=False, config=config, net_arguments={"layers": 1})
    model = nn.Sequential(Checkpointed(world.net.layers[0], mode))
    if compiled:
        torch._dynamo.reset()
        model[0].compile(backend="aot_eager", fullgraph=True)
    world.fully_shard(model, model)
    precompute_float8_dynamic_scale(model)
    x = world.mine(torch.randn(4, 8, 64)).requires_grad_()
    with comm_audit(world.mesh) as audit:
        model(x).square().sum().backward()
    return audit.table(), audit.count(op="all_reduce", dtype=torch.int32)


@full_tier
@pytest.mark.filterwarnings("ignore")
def test_checkpointing_inside_of_fsdp(ranks: RankPools) -> None:
    def run(mode: str, compiled: bool) -> tuple[str, int]:
        found: tuple[str, int] = ranks(4).run_same(inside_of_fsdp, mode, compiled, timeout=180)
        return found

    expected = run("none", False)
    assert run("selective", False) == run("selective", True) == expected
    # In full, no amax of a weight is repeated. Eager code casts the input of the row-parallel layer
    # again, whose rows are in parts.
    _, amaxes = expected
    assert run("full", False)[1] == amaxes + 1
    assert run("full", True)[1] == amaxes
