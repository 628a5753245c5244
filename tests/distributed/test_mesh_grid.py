"""Every mesh x every shape x {with, without precompute} x every recipe: all operands of the three
GEMMs, bit by bit.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from ranks import RankPools, device_mesh
from reference import Product, float8_gemms, same_bits, same_cast, scale_of_elements
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from fp8_dist import (
    Float8LinearConfig,
    Float8LinearRecipeName,
    Float8Tensor,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
)
from fp8_dist.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, apply_tp_plan

# name -> (sizes of the mesh's axes, style of the tensor-parallel layer, sharded dim of FSDP2).
# Axes: pp (the stage uses the rest), replicate, shard, tp; 1 where a mesh lacks the axis.
MESHES: dict[str, tuple[tuple[int, int, int, int], str, int]] = {
    "FSDP2 x2": ((1, 1, 2, 1), "", 0),
    "FSDP2 x3": ((1, 1, 3, 1), "", 0),
    "FSDP2 x4": ((1, 1, 4, 1), "", 0),
    "FSDP2 x2, Shard(1)": ((1, 1, 2, 1), "", 1),
    "HSDP 2x2": ((1, 2, 2, 1), "", 0),
    "TP x2, column": ((1, 1, 1, 2), "column", 0),
    "TP x2, row": ((1, 1, 1, 2), "row", 0),
    "TP x3, column": ((1, 1, 1, 3), "column", 0),
    "TP x4, row": ((1, 1, 1, 4), "row", 0),
    "FSDP2 2 x TP 2, column": ((1, 1, 2, 2), "column", 0),
    "FSDP2 2 x TP 2, row": ((1, 1, 2, 2), "row", 0),
    "HSDP 2x2 x TP 2, column": ((1, 2, 2, 2), "column", 0),
    "HSDP 2x2 x TP 2, row": ((1, 2, 2, 2), "row", 0),
    "stage of PP 2: FSDP2 2 x TP 2": ((2, 1, 2, 2), "column", 0),
}
SHAPES = {
    "even": (48, 24),
    "33 rows": (33, 24),
    "1 row": (1, 24),
    "33 columns": (48, 33),
    "3 x 1": (3, 1),
}
# What FSDP2 itself can't do, and where it is refused: uneven shards on dim 1, by FSDP2; gradients
# of empty tensor-parallel shards, by the weight that it gathers.
REFUSED = {
    ("FSDP2 x2, Shard(1)", "33 columns"): NotImplementedError,
    ("FSDP2 x2, Shard(1)", "3 x 1"): NotImplementedError,
    ("FSDP2 2 x TP 2, column", "1 row"): ValueError,
    ("FSDP2 2 x TP 2, row", "3 x 1"): ValueError,
    ("HSDP 2x2 x TP 2, column", "1 row"): ValueError,
    ("HSDP 2x2 x TP 2, row", "3 x 1"): ValueError,
    ("stage of PP 2: FSDP2 2 x TP 2", "1 row"): ValueError,
}


def stage_mesh(axes: tuple[int, int, int, int]) -> DeviceMesh:
    """The mesh of this rank's stage; made once for each pool of ranks, groups are not for free."""
    pp, replicate, shard, tp = axes
    whole = device_mesh(pp=pp, replicate=replicate, shard=shard, tp=tp)
    return whole["replicate", "shard", "tp"]


def build(
    mesh: DeviceMesh, style: str, dim: int, shape: tuple[int, int], config: Float8LinearConfig
) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(shape[1], shape[0]))
    shard = mesh["shard"].size() > 1 or mesh["replicate"].size() > 1
    gather = shard and config.gather_cast("weight") is not None
    config = replace(config, enable_fsdp_float8_all_gather=gather)
    convert_to_float8_training(model, config=config)
    if style:
        kind = Float8ColwiseParallel if style == "column" else Float8RowwiseParallel
        place = {"output_layouts": Replicate()} if style == "column" else {}
        apply_tp_plan(model, mesh["tp"], {"0": kind(input_layouts=Replicate(), **place)})
    if shard:
        data = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
        fully_shard(
            model, mesh=data, shard_placement_fn=lambda p: Shard(dim) if p.ndim > dim else None
        )
    return model


def captured_step(model: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[Product]:
    """The operands of each float8 GEMM of one step: output, grad_input, grad_weight."""
    with float8_gemms() as calls:
        model(x.requires_grad_()).backward(grad)
    return calls


# Of each GEMM's left and right operand: the dim that a tensor-parallel style splits.
SPLIT: dict[str, list[tuple[int | None, int | None]]] = {
    "": [(None, None), (None, None), (None, None)],
    "column": [(None, 1), (1, 0), (0, None)],
    "row": [(1, 0), (None, 1), (None, 1)],
}


def part(whole: Float8Tensor, dim: int | None, size: int, rank: int) -> Float8Tensor:
    if dim is None:
        return whole
    chunks = [*whole.split(-(-whole.shape[dim] // size), dim=dim)]
    if rank < len(chunks):
        return chunks[rank]  # type: ignore[return-value]
    empty = whole.split(whole.shape[dim], dim=dim)[0]
    return torch.ops.aten.slice.Tensor(empty, dim, 0, 0)


def is_part(mine: Float8Tensor, whole: Float8Tensor, dim: int | None, size: int, rank: int) -> bool:
    """Whether a rank holds its part of an operand with scales of blocks, which parts may cut."""
    data, scales = whole.qdata.view(torch.uint8), scale_of_elements(whole)
    if dim is not None:
        chunk = -(-whole.shape[dim] // size)
        start = min(rank * chunk, whole.shape[dim])
        length = min(chunk, whole.shape[dim] - start)
        data, scales = data.narrow(dim, start, length), scales.narrow(dim, start, length)
    same = torch.equal(mine.qdata.view(torch.uint8), data)
    return same and same_bits(scale_of_elements(mine), scales.contiguous())


def are_equal(found: Product, expected: list[Float8Tensor]) -> list[bool]:
    pairs = list(zip(found, expected, strict=True))
    if any(x.numel() == 0 for x in found) and any(x.scale.ndim for x in found):
        # Scales of empty rows are of no use, and neither is what was folded with them.
        return [mine.shape == theirs.shape for mine, theirs in pairs]
    return [same_cast(mine, theirs) for mine, theirs in pairs]


def data_of(seed: int, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    tokens = torch.randn(6, 1).exp()
    return tokens * torch.randn(6, shape[1]), tokens.flip(0) * torch.randn(6, shape[0])


def verdicts(
    axes: tuple[int, int, int, int], style: str, dim: int, shape: tuple[int, int], precompute: bool
) -> dict[str, list[bool]]:
    """Per recipe and operand: is it, bit for bit, this rank's part of one process's?"""
    mesh = stage_mesh(axes)
    # Data-parallel ranks have activations of their own, tensor-parallel ranks share theirs.
    seed = torch.distributed.get_rank() // axes[3]
    replicas = axes[1] * axes[2]
    results = {}
    for recipe in Float8LinearRecipeName:
        # (GPUs multiply no other sizes than multiples of 16.)
        config = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)
        model = build(mesh, style, dim, shape, config)
        torch.manual_seed(0)
        twin = nn.Sequential(nn.Linear(shape[1], shape[0]))
        convert_to_float8_training(twin, config=config)
        if recipe is Float8LinearRecipeName.DELAYED:
            # A step before, so that there is a history: its data-parallel batches are one batch.
            first = seed // replicas * replicas
            for other in range(first, first + replicas):
                captured_step(twin, *data_of(100 + other, shape))
            captured_step(model, *data_of(100 + seed, shape))
            for each in (model, twin):
                sync_float8_amax_and_scale_history(each)
        elif precompute:
            precompute_float8_dynamic_scale(model)
        found = captured_step(model, *data_of(seed, shape))
        whole = captured_step(twin, *data_of(seed, shape))
        tp, rank = mesh["tp"].size(), mesh["tp"].get_local_rank()
        same = []
        for mine, all_of_it, dims in zip(found, whole, SPLIT[style], strict=False):
            if "block" in mine[0].granularity:
                operands = zip(mine, all_of_it, dims, strict=True)
                same += [is_part(*operand, tp, rank) for operand in operands]
                continue
            expected = [part(o, at, tp, rank) for o, at in zip(all_of_it, dims, strict=True)]
            same += are_equal(mine, expected)
        gemms = 2 if recipe is Float8LinearRecipeName.ROWWISE_WITH_GW_HP else 3
        assert len(found) == len(whole) == gemms
        results[recipe.value] = same
    return results


@pytest.mark.parametrize("precompute", [False, True], ids=["dynamic", "precompute"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mesh", MESHES)
def test_operands(
    ranks: RankPools,
    mesh: str,
    shape: str,
    precompute: bool,
) -> None:
    axes, style, dim = MESHES[mesh]
    pool = ranks(torch.Size(axes).numel())
    arguments = (axes, style, dim, SHAPES[shape], precompute)
    if error := REFUSED.get((mesh, shape)):
        assert pool.run(refused, *arguments[:4], error) == [True] * pool.world_size
        return
    results = pool.run(verdicts, *arguments, timeout=120)
    equal = all(all(same) for r in results for same in r.values())
    assert equal, results


def refused(
    axes: tuple[int, int, int, int],
    style: str,
    dim: int,
    shape: tuple[int, int],
    error: type[Exception],
) -> bool:
    for recipe in ("tensorwise", "rowwise_folded", "delayed"):
        config = Float8LinearConfig.from_recipe_name(recipe)
        with pytest.raises(error, match=r"uneven sharding on dim 1|can't reduce an empty gradient"):
            build(stage_mesh(axes), style, dim, shape, config)(torch.randn(6, shape[1]))
    return True
