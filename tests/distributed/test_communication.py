"""The communication contract, counted: kind, axis, dtype, count and bytes of each collective."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from nets import Distributed, full
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import all_warnings, known, same_bits, same_cast
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fp8_dist import (
    CastConfig,
    Float8LinearConfig,
    cast_to_float8,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
    update_float8_scales,
)
from fp8_dist.debug import CommRow, comm_audit
from fp8_dist.mesh import local_tensor
from fp8_dist.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, apply_tp_plan

INT32 = torch.int32  # amax travels as the bits of a non-negative float
PHASES = ("precompute", "forward", "backward")
Rows = dict[str, list[CommRow]]  # of each phase


def audited_steps(
    dp: int, tp: int, precompute: bool, arguments: dict[str, Any] | None = None
) -> Rows:
    """What is communicated in the second step."""
    world = Distributed(dp, tp, **(arguments or {}))
    optimizer = torch.optim.AdamW(world.net.parameters(), lr=1e-2)
    x = world.mine(torch.randn(4, 8, 64))
    for _ in range(2):
        audits = {phase: comm_audit(world.mesh) for phase in PHASES}
        with audits["precompute"]:
            if precompute:
                precompute_float8_dynamic_scale(world.net)
        with audits["forward"]:
            loss = world.net(x).square().mean()
        with audits["backward"]:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {phase: audit.without_modules().rows for phase, audit in audits.items()}


def side_by_side(steps: dict[str, Rows]) -> str:
    """A line per phase and kind of collective: how many in each step, of how many elements.

    "+" as in `CommAudit.table`: these elements travel in the gathers of the line above.
    """
    cells: dict[str, dict[str, str]] = {}
    for phase in PHASES:
        for name, rows in steps.items():
            for row in rows[phase]:
                dtype = "+ " * row.in_mixed_gather + str(row.dtype).removeprefix("torch.")
                kind = f"{phase:11}{row.op:15}{row.axis:6}{dtype:14}"
                cells.setdefault(kind, {})[name] = f"{row.count} of {row.elements:,}"
    lines = [" " * 46 + "".join(f"{name:>15}" for name in steps)]
    for kind, by_step in cells.items():
        lines.append(kind + "".join(f"{by_step.get(name, '-'):>15}" for name in steps))
    return "\n".join(lines)


def test_tensor_parallelism(ranks: RankPools) -> None:
    steps = {
        "sequence": ranks(2).run_same(audited_steps, 1, 2, True),
        "no sequence": ranks(2).run_same(audited_steps, 1, 2, True, {"sequence_parallel": False}),
    }
    assert_expected_inline(
        side_by_side(steps),
        """\
                                                     sequence    no sequence
precompute all_reduce     tp    int32                  1 of 6         1 of 6
forward    all_reduce     tp    int32                  4 of 4         2 of 2
forward    all_gather     tp    float8_e4m3fn      2 of 4,096              -
forward    reduce_scatter tp    float32            2 of 4,096              -
forward    all_reduce     tp    float32                     -     2 of 4,096
backward   all_reduce     tp    float32              2 of 128     1 of 2,048
backward   all_reduce     tp    int32                  6 of 6         4 of 4
backward   all_gather     tp    float8_e5m2        2 of 4,096              -
backward   reduce_scatter tp    float32            1 of 2,048              -""",
    )


def test_fsdp_and_tensor_parallelism(ranks: RankPools) -> None:
    steps = {
        "precompute": ranks(4).run_same(audited_steps, 2, 2, True),
        "no precompute": ranks(4).run_same(audited_steps, 2, 2, False),
    }
    assert_expected_inline(
        side_by_side(steps),
        """\
                                                   precompute  no precompute
precompute all_reduce     world int32                  1 of 6              -
forward    all_gather     dp    float8_e4m3fn     2 of 18,432    2 of 18,432
forward    all_gather     dp    + float32            0 of 224       0 of 224
forward    all_reduce     tp    int32                  4 of 4         4 of 4
forward    all_gather     tp    float8_e4m3fn      2 of 2,048     2 of 2,048
forward    reduce_scatter tp    float32            2 of 2,048     2 of 2,048
forward    all_reduce     world int32                       -         6 of 6
backward   all_gather     dp    float8_e4m3fn     2 of 18,432    2 of 18,432
backward   all_gather     dp    + float32            0 of 224       0 of 224
backward   all_reduce     tp    float32              2 of 128       2 of 128
backward   all_reduce     tp    int32                  6 of 6         6 of 6
backward   all_gather     tp    float8_e5m2        2 of 2,048     2 of 2,048
backward   reduce_scatter tp    float32            1 of 1,024     1 of 1,024
backward   reduce_scatter dp    float32           2 of 18,656    2 of 18,656""",
    )


def test_row_scales(ranks: RankPools) -> None:
    """Scales travel with float8 rows; if shards are uneven, amaxes are all-reduced before."""
    folded = Float8LinearConfig.from_recipe_name("rowwise_folded")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    even = {"config": folded, "fsdp_arguments": {"mp_policy": policy}}
    uneven = {"config": folded, "net_arguments": {"hidden": 33}}
    steps = {
        "even, tp 2": ranks(4).run_same(audited_steps, 2, 2, True, even),
        "uneven": ranks(2).run_same(audited_steps, 2, 1, True, uneven),
    }
    assert_expected_inline(
        side_by_side(steps),
        """\
                                                   even, tp 2         uneven
precompute all_reduce     tp    int32                1 of 128              -
precompute all_reduce     dp    int32                       -       1 of 132
forward    all_gather     dp    float8_e4m3fn     2 of 18,432    2 of 12,928
forward    all_gather     dp    + float32            0 of 320       0 of 324
forward    all_gather     dp    + bfloat16           0 of 224              -
forward    all_gather     tp    float8_e4m3fn      2 of 2,048              -
forward    all_gather     tp    + float32             0 of 32              -
forward    all_reduce     tp    int32                 2 of 32              -
forward    reduce_scatter tp    bfloat16           2 of 2,048              -
backward   all_gather     dp    float8_e4m3fn     2 of 18,432    2 of 12,928
backward   all_gather     dp    + float32            0 of 320       0 of 324
backward   all_gather     dp    + bfloat16           0 of 224              -
backward   all_reduce     tp    bfloat16             2 of 128              -
backward   all_gather     tp    float8_e4m3fn      2 of 2,048              -
backward   all_gather     tp    + float32             0 of 64              -
backward   all_reduce     tp    int32                 4 of 96              -
backward   reduce_scatter tp    bfloat16           1 of 1,024              -
backward   reduce_scatter dp    bfloat16          2 of 18,656              -
backward   reduce_scatter dp    float32                     -    2 of 13,124""",
    )


@pytest.mark.parametrize("operand", ["input", "grad_output"])
@on_ranks(2)
def test_rows_that_can_not_travel_in_float8_are_named(operand: str) -> None:
    config = Float8LinearConfig.from_recipe_name("rowwise_folded")
    net = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config=config)
    styles = {
        "input": Float8ColwiseParallel(input_layouts=Shard(-1)),
        "grad_output": Float8RowwiseParallel(output_layouts=Shard(-1)),
    }
    apply_tp_plan(net, device_mesh(tp=2), {"0": styles[operand]})
    with all_warnings() as texts:
        net(torch.randn(4, 16)).sum().backward()
    (text,) = [text for text in texts if "high precision" in text]
    assert text.startswith(f"0: {operand} is gathered in high precision, because")


@pytest.mark.parametrize(
    ("recipe", "reshard"), [("tensorwise", False), ("rowwise", True), ("mxfp8", True)]
)
@on_ranks(2, 2, returns=[])
def test_precomputed_scales_of_what_fsdp_gathers_in_high_precision(
    recipe: str, reshard: bool
) -> list[str]:
    """Two micro-batches and an evaluation: the bits and the collectives of each step."""
    results, reduced = [], []
    for precompute in (False, True):
        config = Float8LinearConfig.from_recipe_name(recipe)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        arguments = {"reshard_after_forward": reshard, "mp_policy": policy}
        world = Distributed(2, 2, False, config, gather=False, fsdp_arguments=arguments)
        found = []
        with comm_audit(world.mesh) as audit:
            for seed in range(2):
                if precompute:
                    update_float8_scales(world.net)
                generator = torch.Generator().manual_seed(seed)
                x = world.mine(torch.randn(4, 8, 64, generator=generator)).bfloat16()
                for _ in range(2):
                    found.append(world.net(x))
                    found[-1].square().mean().backward()
                with torch.no_grad():
                    found.append(world.net(x))
                torch.optim.SGD(world.net.parameters(), lr=0.1).step()
        results.append([*found, *(local_tensor(p) for p in world.net.parameters())])
        dtypes = (torch.int32, torch.uint8)
        reduced.append(sum(r.count for r in audit.rows if r.dtype in dtypes))
    wrong = [] if all(map(same_bits, *results)) else ["bits"]
    # In two steps of three forwards, six all-reduces per forward become one per update.
    if reduced[0] - reduced[1] != 2 * 3 * 6 - 2:
        wrong.append(f"{reduced}")
    return wrong


def reductions(converted: bool) -> list[CommRow]:
    """Reduce-scatters of a group with float8 and bf16 parameters, where FSDP2 is asked for no dtype."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 16))
    if converted:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(net, config=config)
    mesh = device_mesh(dp=2)
    fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with comm_audit(mesh) as audit:
        net(torch.randn(4, 32, dtype=torch.bfloat16)).sum().backward()
    return [row for row in audit.rows if row.op == "reduce_scatter"]


@on_ranks(2)
def test_gradients_are_reduced_in_the_dtype_that_fsdp_takes() -> None:
    # That of the computation, of the parameters since torch 2.15.
    ours, theirs = (reductions(converted) for converted in (True, False))
    assert ours == theirs
    assert sum(row.count for row in ours) == 1


@on_ranks(4, returns=[])
def test_one_all_reduce_for_weights_on_different_submeshes() -> list[str]:
    """Layers on dp x tp, on dp alone, on tp alone and on no mesh, one precompute."""
    mesh = device_mesh(dp=2, tp=2)
    tp, dp = mesh.get_local_rank("tp"), mesh.get_local_rank("dp")
    torch.manual_seed(0)
    net = nn.ModuleDict({name: nn.Linear(32, 48) for name in ("both", "dp", "tp", "none")})
    with torch.no_grad():
        # Values differ along axes outside of a weight's mesh: a MAX over all ranks is wrong.
        net["dp"].weight *= 1 + 10 * tp
        net["tp"].weight *= 1 + 10 * dp
        net["none"].weight *= 1 + torch.distributed.get_rank()
    masters = {name: layer.weight.detach().clone() for name, layer in net.items()}
    convert_to_float8_training(net)
    for name, axes in (("both", ("dp", "tp")), ("dp", ("dp",)), ("tp", ("tp",))):
        weight = distribute_tensor(
            masters[name], mesh[axes], [Shard(0)] * len(axes), src_data_rank=None
        )
        net[name].weight = nn.Parameter(weight)
    with comm_audit(mesh) as audit:
        precompute_float8_dynamic_scale(net)
    wrong = [] if audit.count() == audit.count("all_reduce") == 1 else [audit.table()]
    for name in ("both", "dp", "tp"):
        found = known(net[name].weight)
        if found is None or found.view(torch.float32) != masters[name].abs().amax():
            wrong.append(name)
    return wrong


@on_ranks(4, returns=[])
def test_a_cast_dtensor_is_gathered_in_float8() -> list[str]:
    """cast_to_float8(weight).redistribute(): bytes, scale and gradient of every placement."""
    wrong = []
    for shape in ((33, 16), (1, 8), (6, 5, 4)):
        whole = torch.randn(shape)
        one_device = cast_to_float8(whole, CastConfig())
        for mesh, axes in ((device_mesh(dp=4), 1), (device_mesh(dp=2, tp=2), 2)):
            for dim in range(len(shape)):
                for rest in (Shard(dim), Replicate(), Shard((dim + 1) % len(shape))):
                    placements = [Shard(dim), rest][:axes]
                    weight = distribute_tensor(whole, mesh, placements).requires_grad_()
                    with comm_audit(mesh) as audit:
                        cast = cast_to_float8(weight, CastConfig())
                        reduces = audit.count("all_reduce")
                        gathered = cast.redistribute(placements=[Replicate()] * axes)
                    name = f"{shape} {placements}"
                    if reduces != 1 or audit.count("all_gather", dtype=INT32) != 0:
                        wrong.append(f"{name}:\n{audit.table()}")
                    if any(row.op == "all_gather" and row.other_bytes for row in audit.rows):
                        wrong.append(f"{name}:\n{audit.table()}")
                    local = gathered.to_local()
                    if not same_cast(local, one_device):
                        wrong.append(name)
                    local.dequantize().sum().backward()
                    if not torch.equal(full(weight.grad), torch.ones(shape)):
                        wrong.append(f"{name}: gradient")
    return wrong


@on_ranks(2, returns=[True] * 5)
def test_casts_of_dtensors() -> list[bool]:
    """A Partial DTensor is reduced before its cast; other casts dequantize in their placements."""
    mesh = device_mesh(tp=2)
    part = torch.randn(4, 4) * (1 + torch.distributed.get_rank())
    dtensor = DTensor.from_local(part, mesh, [Partial()])
    cast = cast_to_float8(dtensor, CastConfig())
    whole = cast_to_float8(dtensor.full_tensor(), CastConfig())
    same = [cast.placements == (Replicate(),), same_cast(cast.to_local(), whole)]
    full_tensor = torch.randn(5, 4)
    twin = cast_to_float8(full_tensor, CastConfig()).dequantize()
    for placement in (Replicate(), Shard(0), Shard(1)):
        cast = cast_to_float8(distribute_tensor(full_tensor, mesh, [placement]), CastConfig())
        same.append(same_bits(cast.dequantize().full_tensor(), twin))
    return same
