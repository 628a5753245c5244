"""Scales of blocks on meshes: what is communicated, where blocks that shards cut can't travel,
and what a NaN reaches. (test_mesh_grid.py has their operands.)
"""

import math
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from expecttest import assert_expected_inline
from gemm_records import record_gemms
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import all_warnings, same_cast
from test_mesh_grid import (
    BLOCKS,
    MESHES,
    SHAPES,
    Mesh,
    change,
    data_of,
    on_mesh,
    parts_of,
    stage_mesh,
    step,
)
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from fp8_dist import (
    CastConfig,
    Float8LinearConfig,
    Float8Tensor,
    ScalingGranularity,
    cast_to_float8,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)
from fp8_dist.debug import CommAudit, comm_audit
from fp8_dist.tensor_parallel import Float8ColwiseParallel, PrepareFloat8ModuleInput, apply_tp_plan


def amax_reductions(audit: CommAudit) -> str:
    """All-reduces of exponents: bytes, where gradients are fp32."""
    rows = [row for row in audit.rows if row.op == "all_reduce" and row.dtype != torch.float32]
    assert all(row.dtype is torch.uint8 for row in rows)
    shown = [f"{row.count} of {row.bytes} B over {row.axis}" for row in rows]
    return " + ".join(shown) or "-"


def gathered(audit: CommAudit) -> str:
    rows = [row for row in audit.rows if row.op == "all_gather"]
    return " + ".join(f"{row.bytes} B {row.dtype}".replace("torch.", "") for row in rows) or "-"


def collectives(at: Mesh) -> list[str]:
    """A line per recipe and shape: a step alone; precompute; a step after it; its gathers."""
    mesh, lines = stage_mesh(at.axes), []
    for recipe, shape in product(BLOCKS, (SHAPES["whole blocks"], SHAPES["cut blocks"])):
        model = on_mesh(at, shape, Float8LinearConfig.from_recipe_name(recipe))
        arguments = parts_of(at, *data_of(at, shape))
        alone, precompute, after = (comm_audit(mesh) for _ in range(3))
        with alone:
            step(model, *arguments)
        change(model)
        with precompute:
            precompute_float8_dynamic_scale(model)
        with after:
            step(model, *arguments)
        phases = [amax_reductions(audit) for audit in (alone, precompute, after)]
        sizes = " x ".join(map(str, shape))
        lines.append(f"{recipe} {sizes}: {'; '.join(phases)}; gathers {gathered(after)}")
    return lines


def test_collectives(ranks: RankPools) -> None:
    """All-reduces of exponents in a step; in precompute; in a step after it; what is gathered."""
    lines = []
    for name in ("FSDP2 x2", "TP x3, row", "FSDP2 2 x TP 2, column"):
        lines += [name, *ranks(MESHES[name].ranks).run_same(collectives, MESHES[name])]
    assert_expected_inline(
        "\n".join(lines),
        """\
FSDP2 x2
blockwise 384 x 512: 1 of 12 B over shard; 1 of 12 B over shard; -; gathers 196608 B float8_e4m3fn
blockwise 300 x 260: 1 of 9 B over shard; 1 of 9 B over shard; -; gathers 78000 B float8_e4m3fn
mxfp8 384 x 512: -; -; -; gathers 196608 B float8_e4m3fn + 192 B uint8
mxfp8 300 x 260: 1 of 90 B over shard; 1 of 90 B over shard; -; gathers 78000 B float8_e4m3fn
TP x3, row
blockwise 384 x 512: 2 of 552 B over tp; 1 of 12 B over tp; 1 of 540 B over tp; gathers 51840 B float8_e4m3fn + 405 B uint8
blockwise 300 x 260: 2 of 414 B over tp; 1 of 9 B over tp; 1 of 405 B over tp; gathers 40500 B float8_e4m3fn + 405 B uint8
mxfp8 384 x 512: 2 of 2352 B over tp; 1 of 192 B over tp; 1 of 2160 B over tp; gathers 51840 B float8_e4m3fn + 1620 B uint8
mxfp8 300 x 260: 2 of 1305 B over tp; 1 of 90 B over tp; 1 of 1215 B over tp; gathers 40500 B float8_e4m3fn + 1350 B uint8
FSDP2 2 x TP 2, column
blockwise 384 x 512: 1 of 12 B over world + 1 of 270 B over tp; 1 of 12 B over world; 1 of 270 B over tp; gathers 98304 B float8_e4m3fn + 46080 B float8_e4m3fn + 360 B uint8
blockwise 300 x 260: 1 of 9 B over world + 1 of 270 B over tp; 1 of 9 B over world; 1 of 270 B over tp; gathers 39000 B float8_e4m3fn + 23400 B float8_e4m3fn + 270 B uint8
mxfp8 384 x 512: -; -; -; gathers 98304 B float8_e4m3fn + 96 B uint8 + 46080 B float8_e4m3fn + 1440 B uint8
mxfp8 300 x 260: 1 of 90 B over world + 1 of 900 B over tp; 1 of 90 B over world; 1 of 900 B over tp; gathers 39000 B float8_e4m3fn + 23400 B float8_e4m3fn + 810 B uint8""",
    )


def redistributed(
    config: CastConfig, dim: int | None, shape: tuple[int, int], now: Placement, *to: Placement
) -> list[str]:
    """How redistributions of the cast of a sharded tensor end."""
    mesh, tensor = device_mesh(tp=dist.get_world_size()), torch.randn(shape)
    tensor *= torch.randn(shape).mul(3).exp()
    whole = cast_to_float8(tensor, config, dim=dim).dequantize()
    cast = cast_to_float8(distribute_tensor(tensor, mesh, [now]), config, dim=dim)
    found = []
    for placement in to:
        try:
            moved = cast.redistribute(placements=[placement]).dequantize().full_tensor()
            found.append("moved" if torch.equal(moved, whole) else "WRONG")
        except NotImplementedError as error:
            found.append(str(error).partition(": ")[2])
    return found


def test_parts_of_blocks_are_refused_on_all_ranks(ranks: RankPools) -> None:
    text = (
        "ranks have unequal parts, or parts of one block; call .dequantize() first (of a DTensor: "
        "redistribute it before the cast)"
    )

    def run(size: int, shape: tuple[int, int], block: int, *to: Placement) -> list[str]:
        blocks = CastConfig(scaling_granularity=ScalingGranularity.BLOCKWISE, block_size=(1, block))
        return ranks(size).run_same(redistributed, blocks, None, shape, Shard(1), *to)

    every = (Replicate(), Shard(0))
    # Two blocks on each of two ranks, which share one of them.
    assert run(2, (4, 300), 128, *every) == [text] * 2
    for shape, block in (((300, 260), 128), ((384, 512), 32), ((5, 130), 128)):
        assert run(3, shape, block, *every) == [text] * 2
    assert run(3, (4, 384), 128, Replicate()) == ["moved"]


def test_rows_move_with_their_scales_and_columns_are_refused_on_all_ranks(ranks: RankPools) -> None:
    axiswise = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
    every = (Replicate(), Shard(0), Shard(1))
    # With shape (3, 1), one rank has one row, and its column scale has the shape of a row scale.
    for shape, now in product(((6, 8), (5, 7), (3, 1)), (Shard(0), Shard(1))):
        run = partial(ranks(2).run_same, redistributed, axiswise)
        assert run(-1, shape, now, *every) == ["moved"] * 3
        for then, found in zip(every, run(0, shape, now, *every), strict=True):
            refused = "redistribute " in found
            assert refused or (found, then) == ("moved", now), (shape, now, then, found)


class Twice(nn.Module):
    """Two layers that share their input."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(features, 64, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


@pytest.mark.parametrize(("size", "recipe", "features"), [(2, "blockwise", 300), (3, "mxfp8", 512)])
@on_ranks("size")
def test_prepared_inputs_in_parts_move_in_high_precision(
    size: int, recipe: str, features: int
) -> None:
    """Each rank multiplies the input of one device."""
    torch.manual_seed(0)
    model = Twice(features)
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    x = torch.randn(6, features)
    with record_gemms() as expected:
        model(x)
    style, mesh = Float8ColwiseParallel(), device_mesh(tp=size)
    prepare = PrepareFloat8ModuleInput(
        input_layouts=Shard(-1), desired_input_layouts=Replicate(), use_local_output=False
    )
    apply_tp_plan(model, mesh, {"": prepare, "first": style, "second": style})
    part = distribute_tensor(x, mesh, [Shard(1)])
    with record_gemms() as found, all_warnings() as texts:
        model(part)
    for mine, theirs in zip(found, expected, strict=True):
        assert same_cast(mine.a, theirs.a)
    assert any("input is gathered in high precision" in text for text in texts)


SHAPE = SHAPES["cut blocks"]  # on each of these meshes


def config_for(recipe: str, **fields: Any) -> Float8LinearConfig:
    return replace(Float8LinearConfig.from_recipe_name(recipe), **fields)


def nan_of_a_weight(name: str, precompute: bool) -> list[Any]:
    """First and last NaN row and column of the weight that this rank multiplies, or None."""
    at = MESHES[name]
    model = on_mesh(at, SHAPE, config_for("blockwise"))
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight._local_tensor[10, 5] = math.nan  # type: ignore[union-attr]
    if precompute:
        precompute_float8_dynamic_scale(model)
    found = step(model, *parts_of(at, *data_of(at, SHAPE)))
    weight = found[0][1].t()
    assert isinstance(weight, Float8Tensor)
    bad = weight.dequantize().isnan()
    rows, columns = bad.any(1).nonzero().flatten(), bad.any(0).nonzero().flatten()
    assert torch.equal(bad[rows][:, columns], torch.ones(len(rows), len(columns), dtype=torch.bool))
    return [(t[0].item(), t[-1].item()) if len(t) else None for t in (rows, columns)]


def test_nan_in_one_ranks_part_of_a_block(ranks: RankPools) -> None:
    run = ranks(3).run
    for precompute in (False, True):
        # Row 110 of 300 in parts of 100; row 110 in parts of 100; column 92 of 260 in parts of 87.
        assert run(nan_of_a_weight, "FSDP2 x3", precompute) == [[(0, 127), (0, 127)]] * 3
        by_rows = run(nan_of_a_weight, "TP x3, column", precompute)
        assert by_rows == [[(0, 99), (0, 127)], [(0, 27), (0, 127)], [None, None]]
        by_columns = run(nan_of_a_weight, "TP x3, row", precompute)
        assert by_columns == [[(0, 127), (0, 86)], [(0, 127), (0, 40)], [None, None]]
