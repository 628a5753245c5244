"""Every mesh x every shape x {with, without precompute}: all operands of the three GEMMs, bit by bit.

The verdicts are recorded in pytest's JUnit report; ``scripts/mesh_grid.py`` makes the table in
``docs/mesh_grid.md`` from them.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from ranks import RankPools, device_mesh
from reference import same_bits
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import fp8_dist.function
from fp8_dist import (
    CastConfig,
    Float8LinearConfig,
    Float8Tensor,
    cast_to_float8,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
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


def build(mesh: DeviceMesh, style: str, dim: int, shape: tuple[int, int]) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(shape[1], shape[0]))
    gather = mesh["shard"].size() > 1 or mesh["replicate"].size() > 1
    convert_to_float8_training(
        model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=gather)
    )
    if style:
        kind = Float8ColwiseParallel if style == "column" else Float8RowwiseParallel
        place = {"output_layouts": Replicate()} if style == "column" else {}
        apply_tp_plan(model, mesh["tp"], {"0": kind(input_layouts=Replicate(), **place)})
    if gather:
        data = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
        fully_shard(
            model,
            mesh=data,
            shard_placement_fn=lambda p: Shard(dim) if p.ndim > dim else None,
        )
    return model


def captured_step(model: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> dict[str, Float8Tensor]:
    """The float8 operands of one step, as the GEMMs take them: input, weight, grad_output."""
    calls: list[tuple[Float8Tensor, Float8Tensor]] = []
    original: Callable[..., torch.Tensor] = fp8_dist.function.scaled_mm

    def recording(left, right, **kwargs):  # type: ignore[no-untyped-def]
        calls.append((left.clone(), right.clone()))
        return original(left, right, **kwargs)

    fp8_dist.function.scaled_mm = recording
    try:
        model(x).backward(grad)
    finally:
        fp8_dist.function.scaled_mm = original
    (inputs, weight_t), (grads, weight), (grads_t, again) = calls
    assert same_bits(weight_t.qdata.t(), weight.qdata)
    assert same_bits(grads_t.qdata.t(), grads.qdata)
    assert same_bits(inputs.qdata, again.qdata)
    return {"input": inputs, "weight": weight, "grad_output": grads}


def verdicts(
    axes: tuple[int, int, int, int], style: str, dim: int, shape: tuple[int, int], precompute: bool
) -> dict[str, bool]:
    """Per operand: is it, bit for bit, this rank's part of one process's cast?"""
    mesh = stage_mesh(axes)
    model = build(mesh, style, dim, shape)
    master = nn.Linear(shape[1], shape[0])
    torch.manual_seed(0)
    master.reset_parameters()
    if precompute:
        precompute_float8_dynamic_scale(model)
    # Data-parallel ranks have activations of their own, tensor-parallel ranks share theirs.
    torch.manual_seed(torch.distributed.get_rank() // axes[3])
    x = torch.randn(6, shape[1], requires_grad=True)
    grad = torch.randn(6, shape[0])
    found = captured_step(model, x, grad)
    e5m2 = CastConfig(target_dtype=torch.float8_e5m2)
    whole = {
        "input": cast_to_float8(x.detach(), CastConfig()),
        "weight": cast_to_float8(master.weight.detach(), CastConfig()),
        "grad_output": cast_to_float8(grad, e5m2),
    }
    split_on = {
        "": {},
        "column": {"weight": 0, "grad_output": 1},
        "row": {"weight": 1, "input": 1},
    }[style]
    result = {}
    for name, cast in whole.items():
        part = cast.qdata
        if name in split_on:
            placed = DTensor.from_local(cast.qdata.view(torch.uint8), mesh["tp"], [Replicate()])
            placed = placed.redistribute(placements=[Shard(split_on[name])])
            part = placed.to_local().view(cast.qdata.dtype)
        result[name] = same_bits(found[name].qdata, part) and same_bits(
            found[name].scale, cast.scale
        )
    return result


@pytest.mark.parametrize("precompute", [False, True], ids=["dynamic", "precompute"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mesh", MESHES)
def test_operands(
    ranks: RankPools,
    mesh: str,
    shape: str,
    precompute: bool,
    record_property: Callable[[str, object], None],
) -> None:
    axes, style, dim = MESHES[mesh]
    record_property("mesh", mesh)
    record_property("shape", f"{shape} ({SHAPES[shape][0]} x {SHAPES[shape][1]})")
    record_property("precompute", precompute)
    pool = ranks(torch.Size(axes).numel())
    arguments = (axes, style, dim, SHAPES[shape], precompute)
    if error := REFUSED.get((mesh, shape)):
        record_property("verdict", "refused")
        assert pool.run(refused, *arguments[:4], error) == [True] * pool.world_size
        return
    results = pool.run(verdicts, *arguments, timeout=120)
    record_property("verdict", "bitwise" if all(all(r.values()) for r in results) else "DIFFERS")
    for result in results:
        assert all(result.values()), results


def refused(
    axes: tuple[int, int, int, int],
    style: str,
    dim: int,
    shape: tuple[int, int],
    error: type[Exception],
) -> bool:
    with pytest.raises(error, match=r"uneven sharding on dim 1|can't reduce an empty gradient"):
        build(stage_mesh(axes), style, dim, shape)(torch.randn(6, shape[1]))
    return True
