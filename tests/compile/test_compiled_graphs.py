"""What compiled training steps consist of: graphs, casts, GEMMs and collectives, beside eager's."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from graphs import Compilations, Graphs, Ops
from nets import Distributed, blocks
from ranks import RankPools
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
)
from fp8_dist.debug import comm_audit

RECIPES = [recipe.value for recipe in Float8LinearRecipeName]
GATHERS = {"all_gather", "reduce_scatter"}


class Found(NamedTuple):
    """What forward and backward of a step do, after two steps to warm up.

    Attributes:
        graphs: ops in the graphs that ran, forward and backward.
        graph_bytes: bytes of the collectives in them.
        ops: all ops that ran, in graphs or not.
        collectives: all that ran: op, axis, dtype, whether with others, elements, bytes, count.
    """

    graphs: dict[str, Counter[str]]
    graph_bytes: int
    ops: Counter[str]
    collectives: list[tuple[object, ...]]


def watched(
    model: nn.Module,
    batch: Callable[[], torch.Tensor],
    recipe: str,
    graphs: Graphs | None,
    mesh: DeviceMesh | None = None,
) -> Found:
    """Two steps to warm up, one whose ops are counted, one whose collectives are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compilations, ops, audit = Compilations(), Ops(), comm_audit(mesh)
    compiled, graphs = graphs is not None, graphs or Graphs()
    for watch in (None, None, ops, audit):
        if recipe != "delayed":
            precompute_float8_dynamic_scale(model)
        x = batch().requires_grad_()
        graphs.forget_runs()
        with watch or torch.enable_grad():
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if recipe == "delayed":
            sync_float8_amax_and_scale_history(model)
    # One graph serves all layers in all steps.
    assert (compilations.breaks, compilations.graphs) == (0, compiled)
    assert graphs.made == ({"forward": 1, "backward": 1} if compiled else {})
    rows = sorted(
        (row.op, row.axis, str(row.dtype), row.in_mixed_gather, row.elements, row.bytes, row.count)
        for row in audit.without_modules().rows
    )
    return Found(graphs.ops, graphs.bytes, ops.counts, rows)


def _batch(world: Distributed) -> torch.Tensor:
    return world.mine(torch.randn(4, 8, 64))


def blocks_on_a_mesh(dp: int, tp: int, recipe: str, layers: int) -> list[Found]:
    """Eager and compiled: blocks, each compiled before FSDP2 shards it, as torchtitan does it."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    found = []
    for compiled in (False, True):
        world = Distributed(dp, tp, shard=False, config=config, net_arguments={"layers": layers})
        graphs = Graphs(world.mesh) if compiled else None
        model = blocks(world)
        if graphs:
            for block in model:
                block.compile(backend=graphs.backend, fullgraph=True)
        world.fully_shard(model, model)
        found.append(watched(model, partial(_batch, world), recipe, graphs, world.mesh))
    return found


def casts_beside_graphs(eager: Found, compiled: Found) -> int:
    """A compiled step does what an eager one does; how many casts of it no graph does."""
    inside = compiled.graphs["forward"] + compiled.graphs["backward"]
    beside = compiled.ops - inside
    assert inside <= compiled.ops
    assert set(beside) <= {"quantize"}
    for op in ("scaled_mm", "mm", "reblock", *GATHERS):
        assert eager.ops[op] == compiled.ops[op], op
    # (w1 and w3 share one cast of their input; in eager code not while it is watched.)
    for op in ("amax", "quantize"):
        assert compiled.ops[op] <= eager.ops[op], op
    return beside["quantize"]


# Per layer: amaxes, casts of inputs, weights and gradients. FSDP2 casts weights beside the graphs.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dp", "tp", "recipe", "layers", "amaxes", "casts"),
    [
        (1, 2, "tensorwise", 2, 5, 8),
        (2, 1, "tensorwise", 2, 5, 8),
        (2, 2, "rowwise_folded", 1, 11, 14),
        pytest.param(2, 2, "rowwise", 1, 0, 0, marks=pytest.mark.full),
        (2, 2, "delayed", 1, 0, 0),
    ],
)
def test_blocks(
    ranks: RankPools, dp: int, tp: int, recipe: str, layers: int, amaxes: int, casts: int
) -> None:
    arguments = (dp, tp, recipe, layers)
    eager, compiled = ranks(dp * tp).run_same(blocks_on_a_mesh, *arguments, timeout=180)
    by_fsdp = 3 * layers if dp > 1 and recipe != "rowwise" else 0
    assert casts_beside_graphs(eager, compiled) == by_fsdp
    found = compiled.ops["amax"], compiled.ops["quantize"]
    assert found == (layers * amaxes, layers * casts)
    # Eager code reduces the amaxes of the output gradients of w1 and w3 at once, a graph does not.
    assert [row[:-1] for row in eager.collectives] == [row[:-1] for row in compiled.collectives]
    if recipe != "tensorwise" or tp == 1:
        assert eager.collectives == compiled.collectives
    # In a graph rows travel with their scales as one message of bytes.
    assert compiled.graph_bytes == sum(row[5] for row in eager.collectives if row[1] == "tp")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer(recipe: str) -> None:
    config, found = Float8LinearConfig.from_recipe_name(recipe), []
    for compiled in (False, True):
        layer = Float8Linear(64, 48, config=config)
        graphs = Graphs() if compiled else None
        if graphs:
            layer.compile(backend=graphs.backend, fullgraph=True)
        found.append(watched(layer, lambda: torch.randn(16, 64), recipe, graphs))
    eager, compiled_found = found
    assert casts_beside_graphs(eager, compiled_found) == 0
    assert eager.ops == compiled_found.ops
    forward, backward = compiled_found.graphs["forward"], compiled_found.graphs["backward"]
    # The backward casts the output gradient alone.
    assert (forward["quantize"], backward["quantize"]) == (2, int(recipe != "rowwise_folded"))
    assert forward["scaled_mm"] + backward["scaled_mm"] + backward["mm"] == 3


def test_a_recompilation_is_counted() -> None:
    graphs, compilations = Graphs(), Compilations()
    layer = Float8Linear(64, 48)
    layer.compile(backend=graphs.backend, fullgraph=True)
    for n, dtype in enumerate((torch.float32, torch.bfloat16), start=1):
        layer(torch.randn(16, 64, dtype=dtype)).sum().backward()
        assert (compilations.graphs, graphs.made) == (n, {"forward": n, "backward": n})
