"""Activation checkpointing in graphs: what is computed and communicated a second time."""

from collections import Counter

import pytest
import torch
from checkpointed import Checkpointed, forward
from expecttest import assert_expected_inline
from graphs import OPS, Compilations, Graphs, op_columns
from nets import Distributed, Net, full
from ranks import RankPools
from reference import same_bits
from torch import nn
from torch_releases import RELEASE

from fp8_dist import (
    Float8LinearConfig,
    Float8LinearRecipeName,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)
from fp8_dist.debug import comm_audit


@pytest.mark.parametrize(
    ("recipe", "mode"),
    [
        *((recipe.value, "selective") for recipe in Float8LinearRecipeName),
        ("tensorwise", "full"),
        ("rowwise_folded", "full"),
    ],
)
def test_compiled(recipe: str, mode: str) -> None:
    compilations = Compilations()
    net = convert_to_float8_training(
        Net(layers=1), config=Float8LinearConfig.from_recipe_name(recipe)
    )
    x, results = torch.randn(2, 4, 64), []
    for run in (forward, torch.compile(forward, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        output = run(net, leaf, mode)
        output.square().sum().backward()
        results.append([output.detach(), leaf.grad, *(p.grad for p in net.parameters())])
        net.zero_grad()
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert (compilations.breaks, compilations.graphs) == (0, 1)


def compiled_counts(recipe: str, mode: str) -> tuple[dict[str, Counter[str]], str, bool]:
    """What the graphs of a compiled step hold, and whether it has the bits of an eager step."""
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
    same = all(same_bits(a, b) for a, b in zip(*results, strict=True))
    return graphs.ops, graphs.collectives_shown(), same


@pytest.mark.filterwarnings("ignore")
def test_counts_in_graphs(ranks: RankPools) -> None:
    found = {
        mode: ranks(2).run(compiled_counts, "tensorwise", mode, timeout=180)[0]
        for mode in ("none", "selective")
    }
    assert all(same for _, _, same in found.values())
    columns = {f"{m}, {d[0]}w": n for m, (ops, _, _) in found.items() for d, n in ops.items()}
    assert_expected_inline(
        op_columns(columns),
        """\
                  none, fw  none, bw selective, fw selective, bw
amax                     2         3             2             3
quantize                 5         3             5             8
scaled_mm                3         6             3             6
all_gather               1         1             1             1
reduce_scatter           1         1             1             1
all_reduce               2         4             2             4""",
    )
    assert found["selective"][1] == found["none"][1]


@pytest.mark.filterwarnings("ignore")
def test_what_full_checkpointing_repeats_in_graphs(ranks: RankPools) -> None:
    ops, collectives, same = ranks(2).run(compiled_counts, "tensorwise", "full", timeout=180)[0]
    assert same
    if RELEASE < (2, 12):  # It keeps amaxes and products, and repeats the gathers.
        assert_expected_inline(
            op_columns(ops),
            """\
                   forward  backward
scale_query              3         3
amax                     2         3
quantize                 5         6
scaled_mm                3         6
all_gather               1         2
reduce_scatter           1         1
all_reduce               2         4""",
        )
        return
    # Where a weight is cast again, its scale is known.
    assert_expected_inline(
        op_columns(ops),
        """\
                   forward  backward
amax                     2         5
quantize                 5         8
scaled_mm                3         8
all_gather               1         2
reduce_scatter           1         1
all_reduce               2         6""",
    )
    assert_expected_inline(
        collectives,
        """\
forward   all_reduce      tp  int32      2        8 bytes
forward   all_gather      tp  uint8      1    2,048 bytes
forward   reduce_scatter  tp  float32    1    8,192 bytes
backward  all_reduce      tp  float32    1      256 bytes
backward  all_reduce      tp  int32      5       20 bytes
backward  all_gather      tp  uint8      2    4,096 bytes
backward  reduce_scatter  tp  float32    1    8,192 bytes""",
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_folded"])
def test_graphs_repeat_no_collective_and_no_amax(ranks: RankPools, recipe: str) -> None:
    plain, selective = (
        ranks(2).run(compiled_counts, recipe, mode, timeout=180)[0]
        for mode in ("none", "selective")
    )
    assert selective[1:] == (plain[1], True)
    # Casts are repeated, and nothing else. (What only the backward needs may have moved there.)
    counts = [ops["forward"] + ops["backward"] for ops, _, _ in (plain, selective)]
    assert {op for op in OPS if counts[0][op] != counts[1][op]} <= {"quantize"}


def inside_of_fsdp(mode: str, compiled: bool, write: bool = False) -> tuple[str, int]:
    """The collectives of a step whose weights FSDP2 gathers in high precision, twice.

    And how many of them reduce amaxes. ``write``: the weights change between forward and backward.
    """
    config = Float8LinearConfig.from_recipe_name("rowwise")
    world = Distributed(2, 2, shard=False, config=config, net_arguments={"layers": 1})
    model = nn.Sequential(Checkpointed(world.net.layers[0], mode))
    if compiled:
        torch._dynamo.reset()
        model[0].compile(backend="aot_eager", fullgraph=True)
    world.fully_shard(model, model)
    x = world.mine(torch.randn(4, 8, 64)).requires_grad_()
    with comm_audit(world.mesh) as audit:
        loss = model(x).square().sum()
        if write:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(2)
        loss.backward()
    return audit.table(), audit.count(op="all_reduce", dtype=torch.int32)


@pytest.mark.filterwarnings("ignore")
def test_scales_of_gathered_weights_are_saved(ranks: RankPools) -> None:
    expected = ranks(4).run(inside_of_fsdp, "none", False)
    for compiled in (False, True):
        assert ranks(4).run(inside_of_fsdp, "selective", compiled, timeout=180) == expected


@pytest.mark.filterwarnings("ignore")
def test_full_checkpointing_repeats_no_amax_of_a_gathered_weight(ranks: RankPools) -> None:
    (_, amaxes), *_ = ranks(4).run(inside_of_fsdp, "none", False)
    # Eager code casts the input of the row-parallel layer again, whose rows are in parts.
    for compiled, repeated in ((False, 1), (True, 0)):
        (_, found), *_ = ranks(4).run(inside_of_fsdp, "full", compiled, timeout=180)
        assert found == amaxes + repeated
    (_, found), *_ = ranks(4).run(inside_of_fsdp, "full", False, True)
    assert found == amaxes + 4  # those of the changed weights, too
