"""What compiled training steps consist of: graphs, ops, collectives and bytes, beside eager's."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Compilations, Graphs, Ops, op_columns
from nets import Distributed, Net, blocks
from ranks import RankPools, device_mesh
from reference import kinds
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
)
from fp8_dist.debug import comm_audit

RECIPES = [recipe.value for recipe in Float8LinearRecipeName]


class Found(NamedTuple):
    """What forward and backward of a step were seen to do, after two steps to warm up.

    Attributes:
        compiled: how often dynamo captured a graph, and broke one.
        graphs: ops in the graphs that ran, forward and backward.
        graph_collectives: collectives in them.
        graph_bytes: bytes of these.
        ops: all ops that ran, in graphs or not.
        collectives: all collectives that ran, as a table.
    """

    compiled: str
    graphs: dict[str, Counter[str]]
    graph_collectives: str
    graph_bytes: int
    ops: Counter[str]
    collectives: str


def watched(
    model: nn.Module,
    batch: Callable[[], torch.Tensor],
    recipe: str,
    graphs: Graphs | None,
    mesh: DeviceMesh | None = None,
) -> Found:
    """Two steps to warm up, one whose ops are counted, one whose collectives are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphs = graphs or Graphs()
    compilations = Compilations()
    ops, audit = Ops(), comm_audit(mesh)
    made, seen = [], []
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
        made.append((compilations.graphs, dict(graphs.made)))
        seen.append((graphs.ran, graphs.ops, graphs.collectives_shown()))
    assert made[1] == made[2] == made[3], f"recompiled after warm-up: {made}"
    assert seen[2] == seen[3]
    compiled = (
        f"{compilations.breaks} graph breaks, {compilations.graphs} captured; made and run in a step:"
        f" {graphs.made['forward']} and {graphs.ran['forward']} forward, "
        f"{graphs.made['backward']} and {graphs.ran['backward']} backward"
    )
    shown = graphs.collectives_shown()
    return Found(compiled, graphs.ops, shown, graphs.bytes, ops.counts, audit.table())


def _batch(world: Distributed) -> torch.Tensor:
    return world.mine(torch.randn(4, 8, 64))


def blocks_on_a_mesh(dp: int, tp: int, recipe: str, layers: int) -> tuple[Found, Found]:
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
        batch = partial(_batch, world)
        found.append(watched(model, batch, recipe, graphs, world.mesh))
    return found[0], found[1]


def compared(eager: Found, compiled: Found) -> str:
    """Ops and collectives of a compiled step, in its graphs and beside them; an eager step's ops."""
    inside = compiled.graphs["forward"] + compiled.graphs["backward"]
    assert inside <= compiled.ops
    columns = compiled.graphs | {"beside": compiled.ops - inside, "eager": eager.ops}
    parts = [compiled.compiled, op_columns(columns), compiled.graph_collectives]
    if compiled.collectives != "no collectives":
        parts.append(kinds(compiled.collectives))
    return "\n".join(part for part in parts if part)


def same_on_all(results: list[tuple[Found, Found]]) -> tuple[Found, Found]:
    assert all(result == results[0] for result in results)
    eager, compiled = results[0]
    for op in ("scaled_mm", "mm", "all_gather", "reduce_scatter"):
        assert eager.ops[op] == compiled.ops[op], op
    return eager, compiled


def bytes_on(axis: str, table: str) -> int:
    """The bytes on an axis in a table of collectives."""
    rows = [line.split() for line in table.splitlines()]
    return sum(int(row[-1].replace(",", "")) for row in rows if axis in row)


def without_counts(table: str) -> list[list[str]]:
    """A table of collectives without how many there are.

    (Eager code reduces the amaxes of the output gradients of w1 and w3 at once, a graph does not.)
    """
    rows = [line.split() for line in table.splitlines()]
    return [row[:3] + row[4:] for row in rows if row[0] != "total"]


# (A graph casts the input that w1 and w3 share once; eager code does too, but not while it is
# watched.)
def test_tensor_and_sequence_parallel_blocks(ranks: RankPools) -> None:
    eager, compiled = same_on_all(
        ranks(2).run(blocks_on_a_mesh, 1, 2, "tensorwise", 2, timeout=180)
    )
    assert_expected_inline(
        compared(eager, compiled),
        """\
0 graph breaks, 1 captured; made and run in a step: 1 and 2 forward, 1 and 2 backward
                   forward  backward    beside     eager
amax                     4         6         0        10
quantize                10         6         0        16
scaled_mm                6        12         0        18
all_gather               2         2         0         4
reduce_scatter           2         2         0         4
all_reduce               4         8         0        10
forward   all_reduce      tp  int32      4       16 bytes
forward   all_gather      tp  uint8      2    4,096 bytes
forward   reduce_scatter  tp  float32    2   16,384 bytes
backward  all_reduce      tp  float32    2      512 bytes
backward  all_reduce      tp  int32      6       24 bytes
backward  all_gather      tp  uint8      2    4,096 bytes
backward  reduce_scatter  tp  float32    2   16,384 bytes
op              axis  dtype          count  elements   bytes
all_reduce      tp    int32             10        10      40
all_gather      tp    float8_e4m3fn      2     4,096   4,096
reduce_scatter  tp    float32            4     8,192  32,768
all_reduce      tp    float32            2       128     512
all_gather      tp    float8_e5m2        2     4,096   4,096""",
    )
    assert without_counts(eager.collectives) == without_counts(compiled.collectives)
    assert compiled.graph_bytes == bytes_on("tp", eager.collectives)


def test_fsdp_blocks(ranks: RankPools) -> None:
    # FSDP2 casts and gathers beside the graphs.
    eager, compiled = same_on_all(
        ranks(2).run(blocks_on_a_mesh, 2, 1, "tensorwise", 2, timeout=180)
    )
    assert_expected_inline(
        compared(eager, compiled),
        """\
0 graph breaks, 1 captured; made and run in a step: 1 and 2 forward, 1 and 2 backward
                   forward  backward    beside     eager
amax                     4         6         0        12
quantize                 4         6         6        18
scaled_mm                6        12         0        18
op              axis  dtype          count  elements    bytes
all_gather      dp    float8_e4m3fn      4    73,728   73,728
all_gather      dp    float32            +       640    2,560
reduce_scatter  dp    float32            2    37,184  148,736""",
    )
    assert eager.collectives == compiled.collectives


def test_fsdp_and_tensor_parallel_block(ranks: RankPools) -> None:
    eager, compiled = same_on_all(
        ranks(4).run(blocks_on_a_mesh, 2, 2, "tensorwise", 1, timeout=180)
    )
    assert_expected_inline(
        compared(eager, compiled),
        """\
0 graph breaks, 1 captured; made and run in a step: 1 and 1 forward, 1 and 1 backward
                   forward  backward    beside     eager
amax                     2         3         0         5
quantize                 2         3         3         8
scaled_mm                3         6         0         9
all_gather               1         1         0         2
reduce_scatter           1         1         0         2
all_reduce               2         4         0         5
forward   all_reduce      tp  int32      2        8 bytes
forward   all_gather      tp  uint8      1    1,024 bytes
forward   reduce_scatter  tp  float32    1    4,096 bytes
backward  all_reduce      tp  float32    1      256 bytes
backward  all_reduce      tp  int32      3       12 bytes
backward  all_gather      tp  uint8      1    1,024 bytes
backward  reduce_scatter  tp  float32    1    4,096 bytes
op              axis  dtype          count  elements   bytes
all_gather      dp    float8_e4m3fn      2    18,432  18,432
all_gather      dp    float32            +       224     896
all_reduce      tp    int32              5         5      20
all_gather      tp    float8_e4m3fn      1     1,024   1,024
reduce_scatter  tp    float32            2     2,048   8,192
all_reduce      tp    float32            1        64     256
all_gather      tp    float8_e5m2        1     1,024   1,024
reduce_scatter  dp    float32            1     9,328  37,312""",
    )
    assert without_counts(eager.collectives) == without_counts(compiled.collectives)
    assert compiled.graph_bytes == bytes_on("tp", eager.collectives)


def test_rows_with_scales_of_their_own(ranks: RankPools) -> None:
    eager, compiled = same_on_all(
        ranks(4).run(blocks_on_a_mesh, 2, 2, "rowwise_folded", 1, timeout=180)
    )
    assert_expected_inline(
        compared(eager, compiled),
        """\
0 graph breaks, 1 captured; made and run in a step: 1 and 1 forward, 1 and 1 backward
                   forward  backward    beside     eager
amax                     2         9         0        11
quantize                 2         9         3        14
scaled_mm                3         6         0         9
all_gather               1         1         0         2
reduce_scatter           1         1         0         2
all_reduce               1         3         0         4
forward   all_gather      tp  uint8      1    1,088 bytes
forward   all_reduce      tp  int32      1       64 bytes
forward   reduce_scatter  tp  float32    1    4,096 bytes
backward  all_reduce      tp  float32    1      256 bytes
backward  all_gather      tp  uint8      1    1,152 bytes
backward  all_reduce      tp  int32      2      256 bytes
backward  reduce_scatter  tp  float32    1    4,096 bytes
op              axis  dtype          count  elements   bytes
all_gather      dp    float8_e4m3fn      2    18,432  18,432
all_gather      dp    float32            +       544   2,176
all_gather      tp    float8_e4m3fn      2     2,048   2,048
all_gather      tp    float32            +        48     192
all_reduce      tp    int32              3        80     320
reduce_scatter  tp    float32            2     2,048   8,192
all_reduce      tp    float32            1        64     256
reduce_scatter  dp    float32            1     9,328  37,312""",
    )
    # In a graph rows are seen to travel with their scales as one message of bytes.
    assert compiled.graph_bytes == bytes_on("tp", eager.collectives)
    assert bytes_on("dp", compiled.collectives) == bytes_on("dp", eager.collectives)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_other_recipes_communicate_as_in_eager_code(ranks: RankPools, recipe: str) -> None:
    eager, compiled = same_on_all(ranks(4).run(blocks_on_a_mesh, 2, 2, recipe, 1, timeout=180))
    assert eager.collectives == compiled.collectives


def layer_alone(recipe: str) -> tuple[Found, Found]:
    config = Float8LinearConfig.from_recipe_name(recipe)
    found = []
    for compiled in (False, True):
        layer = Float8Linear(64, 48, config=config)
        graphs = Graphs() if compiled else None
        if graphs:
            layer.compile(backend=graphs.backend, fullgraph=True)
        found.append(watched(layer, lambda: torch.randn(16, 64), recipe, graphs))
    return found[0], found[1]


def test_a_layer_in_every_recipe() -> None:
    shown = []
    for recipe in RECIPES:
        shown.append(f"-- {recipe}\n{compared(*same_on_all([layer_alone(recipe)]))}")
    assert_expected_inline(
        "\n".join(shown),
        """\
-- tensorwise
0 graph breaks, 1 captured; made and run in a step: 1 and 1 forward, 1 and 1 backward
                   forward  backward    beside     eager
amax                     1         1         0         2
quantize                 2         1         0         3
scaled_mm                1         2         0         3
-- rowwise
0 graph breaks, 1 captured; made and run in a step: 1 and 1 forward, 1 and 1 backward
                   forward  backward    beside     eager
amax                     1         1         0         2
quantize                 2         1         0         3
scaled_mm                1         2         0         3
-- rowwise_with_gw_hp
0 graph breaks, 1 captured; made and run in a step: 1 and 1 forward, 1 and 1 backward
                   forward  backward    beside     eager
amax                     1         1         0         2
quantize                 2         1         0         3
scaled_mm                1         1         0         2
mm                       0         1         0         1
-- rowwise_folded
0 graph breaks, 1 captured; made and run in a step: 1 and 1 forward, 1 and 1 backward
                   forward  backward    beside     eager
amax                     1         0         0         1
quantize                 2         0         0         2
scaled_mm                1         2         0         3
-- blockwise
0 graph breaks, 1 captured; made and run in a step: 1 and 1 forward, 1 and 1 backward
                   forward  backward    beside     eager
amax                     1         1         0         2
quantize                 2         1         0         3
reblock                  0         2         0         2
scaled_mm                1         2         0         3
-- mxfp8
0 graph breaks, 1 captured; made and run in a step: 1 and 1 forward, 1 and 1 backward
                   forward  backward    beside     eager
amax                     1         1         0         2
quantize                 2         1         0         3
reblock                  0         2         0         2
scaled_mm                1         2         0         3
-- delayed
0 graph breaks, 1 captured; made and run in a step: 1 and 1 forward, 1 and 1 backward
                   forward  backward    beside     eager
quantize                 2         1         0         3
scaled_mm                1         2         0         3""",
    )


def inside_ddp() -> tuple[Found, Found]:
    found = []
    for compiled in (False, True):
        net = convert_to_float8_training(Net(layers=1))
        graphs = Graphs() if compiled else None
        if graphs:
            net.compile(backend=graphs.backend, fullgraph=True)
        parallel = DistributedDataParallel(net)
        mesh = device_mesh(dp=2)
        found.append(watched(parallel, lambda: torch.randn(2, 8, 64), "tensorwise", graphs, mesh))
    return found[0], found[1]


def test_a_module_inside_ddp(ranks: RankPools) -> None:
    eager, compiled = same_on_all(ranks(2).run(inside_ddp))
    assert_expected_inline(
        compared(eager, compiled),
        """\
0 graph breaks, 1 captured; made and run in a step: 1 and 1 forward, 1 and 1 backward
                   forward  backward    beside     eager
amax                     2         3         0         6
quantize                 5         3         0         9
scaled_mm                3         6         0         9
op          axis  dtype    count  elements   bytes
all_reduce  dp    float32      1    18,592  74,368""",
    )
    assert eager.collectives == compiled.collectives


def test_a_recompilation_is_counted() -> None:
    graphs, compilations = Graphs(), Compilations()
    layer = Float8Linear(64, 48)
    layer.compile(backend=graphs.backend, fullgraph=True)
    layer(torch.randn(16, 64)).sum().backward()
    assert (compilations.graphs, graphs.made) == (1, {"forward": 1, "backward": 1})
    with torch._dynamo.config.patch(error_on_recompile=True):
        layer(torch.randn(16, 64))
        with pytest.raises(torch._dynamo.exc.RecompileError):
            layer(torch.randn(16, 64, dtype=torch.bfloat16))
    layer(torch.randn(16, 64, dtype=torch.bfloat16)).sum().backward()
    assert (compilations.graphs, graphs.made) == (2, {"forward": 2, "backward": 2})
