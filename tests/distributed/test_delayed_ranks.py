"""Delayed scales on several ranks: one all-reduce per step, and the operands of one process."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from delayed_steps import DELAYED, GATHERED, amaxes, audited_steps, histories, recorded
from expecttest import assert_expected_inline
from nets import Distributed, Net, full
from ranks import RankPools, device_mesh
from reference import float8_gemms, kinds, same_bits, same_cast, sqnr
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fp8_dist import convert_to_float8_training
from fp8_dist import sync_float8_amax_and_scale_history as sync
from fp8_dist.debug import comm_audit

INT32 = torch.int32  # an amax travels as the bits of a non-negative float

# Of the left and the right operand of each GEMM: the dim that TP splits; the one with the batch.
GEMMS = ("output", "grad_input", "grad_weight")
SPLIT_BY_TP = {
    "column": dict(zip(GEMMS, [(None, 1), (1, 0), (0, None)], strict=True)),
    "row": dict(zip(GEMMS, [(1, 0), (None, 1), (None, 1)], strict=True)),
}
# The GEMMs of a step of one MLP: w1, w3, w2, and back.
ORDER = [("column", "output"), ("column", "output"), ("row", "output")]
ORDER += [(style, gemm) for style in ("row", "column", "column") for gemm in GEMMS[1:]]
SPLIT_BY_DP = dict(zip(GEMMS, [(0, None), (0, None), (1, 0)], strict=True))


def differing_operands(dp: int, tp: int) -> list[str]:
    """In three steps with changing weights: operands that aren't this rank's part of the twin's."""
    # One MLP: the next one's input has other bits, if sums are taken in another order.
    world = Distributed(dp, tp, config=DELAYED, net_arguments={"layers": 1})
    rank = {"dp": world.mesh.get_local_rank("dp"), "tp": world.mesh.get_local_rank("tp")}
    wrong = []
    for step in range(3):
        x, grad = (torch.randn(4, 8, 64) * (step + 1) for _ in range(2))
        with float8_gemms() as ours:
            world.net(world.mine(x).requires_grad_()).backward(world.mine(grad))
        # Dynamic scales are those of each data-parallel rank's batch, delayed ones of them all.
        parts = 1 if step else dp
        twins = []
        for x_part, grad_part in zip(x.chunk(parts), grad.chunk(parts), strict=True):
            with float8_gemms() as theirs:
                world.twin(x_part.requires_grad_()).backward(grad_part)
            twins.append(theirs)
        theirs = twins[rank["dp"] if parts > 1 else 0]
        for net in (world.net, world.twin):
            sync(net)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(1.5)
        for mine, whole, (style, gemm) in zip(ours, theirs, ORDER, strict=True):
            for i, side in enumerate(("left", "right")):
                expected = whole[i]
                for size, at, dim in (
                    (tp, rank["tp"], SPLIT_BY_TP[style][gemm][i]),
                    (dp // parts, rank["dp"] // parts, SPLIT_BY_DP[gemm][i]),
                ):
                    expected = expected if dim is None else expected.chunk(size, dim)[at]
                if not same_cast(mine[i], expected):
                    wrong.append(f"step {step}: {side} operand of {gemm}, {style}-parallel")
    expected = amaxes(world.twin)
    for name, values in amaxes(world.net).items():
        name = name.replace("prepared_input", "input")
        if values and values != expected[name]:
            wrong.append(f"history of {name}")
    return wrong


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_operands_are_those_of_one_process(ranks: RankPools, dp: int, tp: int) -> None:
    assert ranks(dp * tp).run(differing_operands, dp, tp) == [[]] * (dp * tp)


def audited(dp: int, tp: int) -> dict[str, Any]:
    world = Distributed(dp, tp, config=DELAYED)
    optimizer = torch.optim.AdamW(world.net.parameters())
    amax_reduces, tables = [], {}
    for _ in range(3):
        with comm_audit(world.mesh) as step:
            for _ in range(2):
                world.net(world.mine(torch.randn(4, 8, 64))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with comm_audit(world.mesh) as end:
            sync(world.net)
        amax_reduces.append(step.count("all_reduce", dtype=INT32))
        tables = {"two micro-batches": step.table(), "sync": end.table()}
        assert end.count() == end.count("all_reduce", dtype=INT32) == 1
        assert sum(row.elements for row in end.rows) == len(histories(world.net))
    return {"first": amax_reduces[0], "later": amax_reduces[1:], "tables": tables}


@pytest.mark.parametrize(("dp", "tp", "first"), [(2, 1, 6), (1, 2, 26), (2, 2, 26)])
def test_no_amax_travels_after_the_first_step(
    ranks: RankPools, dp: int, tp: int, first: int
) -> None:
    for found in ranks(dp * tp).run(audited, dp, tp):
        assert found["first"] == first
        assert found["later"] == [0, 0]


def test_what_travels_on_two_axes(ranks: RankPools) -> None:
    results = ranks(4).run(audited, 2, 2)
    assert all(found == results[0] for found in results)
    assert_expected_inline(
        "\n".join(f"-- {name}\n{kinds(table)}" for name, table in results[0]["tables"].items()),
        """\
-- two micro-batches
op              axis  dtype          count  elements    bytes
all_gather      dp    float8_e4m3fn      8    73,728   73,728
all_gather      dp    float32            +       896    3,584
all_gather      tp    float8_e4m3fn      4     4,096    4,096
reduce_scatter  tp    float32            6     6,144   24,576
all_reduce      tp    float32            4       256    1,024
all_gather      tp    float8_e5m2        4     4,096    4,096
reduce_scatter  dp    float32            4    37,312  149,248
-- sync
op          axis   dtype  count  elements  bytes
all_reduce  world  int32      1        20     80""",
    )


def uneven() -> list[bool]:
    """33 rows, and 1 row that one rank has none of, by FSDP2."""
    models = []
    for config in (GATHERED, DELAYED):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 33), nn.Linear(33, 1, bias=False))
        models.append(convert_to_float8_training(model, config=config))
    model, twin = models
    mesh = device_mesh(dp=2)
    fully_shard(model, mesh=mesh)
    same = []
    for step in range(3):
        x = torch.randn(8, 16) * (step + 1)
        model.zero_grad()
        twin.zero_grad()
        with comm_audit(mesh) as audit:
            out = model(x.chunk(2)[dist.get_rank()])
            out.sum().backward()
        # (Dynamic scales are those of each rank's batch.)
        parts = [twin(part) for part in x.chunk(1 if step else 2)]
        whole = torch.cat(parts)
        whole.sum().backward()
        same.append(same_bits(out, whole.chunk(2)[dist.get_rank()]))
        same.append(audit.count("all_reduce") == (0 if step else 2))
        for each in (model, twin):
            sync(each)
        same.append(amaxes(model) == amaxes(twin))
        same += [
            sqnr(theirs.grad, full(ours.grad) * 2) > 120
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True)
        ]
    return same


def test_uneven_shards(ranks: RankPools) -> None:
    assert ranks(2).run(uneven) == [[True] * 18] * 2


def offloaded() -> bool:
    found = []
    for arguments in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        world = Distributed(2, 1, config=DELAYED, fsdp_arguments=arguments)
        x = world.mine(torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(1)))
        found.append(audited_steps(world.net, x, world.mesh)["amaxes"])
    return found[0] == found[1]


def test_cpu_offload(ranks: RankPools) -> None:
    assert ranks(2).run(offloaded) == [True, True]


def poisoned(dp: int, tp: int, where: str) -> dict[str, Any]:
    """A NaN on rank 0 alone, in a step whose scales come from the history."""
    world = Distributed(dp, tp, config=DELAYED)
    x = world.mine(torch.randn(4, 8, 64))
    for _ in range(2):
        world.net(x).square().mean().backward()
        sync(world.net)
    before = amaxes(world.net)
    with torch.no_grad():
        if dist.get_rank() == 0:
            if where == "input":
                x[0, 0, 0] = torch.nan
            else:
                world.net.layers[0].w1.weight.to_local().view(-1)[0] = torch.nan
    world.net.zero_grad()
    output = world.net(x)
    output.square().mean().backward()
    with torch.no_grad():
        if dist.get_rank() == 0 and where == "weight":
            world.net.layers[0].w1.weight.to_local().view(-1)[0] = 0.0
    sync(world.net)
    after = amaxes(world.net)
    return {
        "output": bool(output.isnan().any()),
        "gradients": all(bool(full(p.grad).isnan().any()) for p in world.net.parameters()),
        "histories": all(max(after[n]) == max(v) for n, v in before.items() if v),
        "next": bool(world.net(x.nan_to_num()).isfinite().all()),
    }


@pytest.mark.parametrize("where", ["input", "weight"])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_a_nan_on_one_rank(ranks: RankPools, dp: int, tp: int, where: str) -> None:
    results = ranks(dp * tp).run(poisoned, dp, tp, where)
    for rank, found in enumerate(results):
        # Data-parallel ranks have inputs of their own, and share weights and their gradients.
        assert found["output"] is (where == "weight" or rank < tp), rank
        assert found["gradients"]
        assert found["histories"]
        assert found["next"]


def copied() -> list[bool]:
    """A copy of a tensor-parallel model, whose hooks are those of the model."""
    world = Distributed(1, 2, config=DELAYED)
    x = world.mine(torch.randn(4, 8, 64))
    world.net(x).sum().backward()
    sync(world.net)
    twin = copy.deepcopy(world.net)
    before = amaxes(world.net)
    for _ in range(2):
        twin(x * 5).sum().backward()
        sync(twin)
    found = [h.current is None for h in histories(world.net).values()]
    prepared = amaxes(twin)["layers.0.w1.prepared_input"]
    return [all(found), amaxes(world.net) == before, len(prepared) == 3]


def test_copies_of_tensor_parallel_models(ranks: RankPools) -> None:
    assert ranks(2).run(copied) == [[True] * 3] * 2


def variation(dp: int, tp: int, kind: str) -> bool:
    """Are losses, gradients and histories the same with, and without?"""
    results = []
    for varied in (False, True):
        gather = not (varied and kind == "high-precision gather")
        world = Distributed(dp, tp, config=DELAYED, gather=gather)

        def forward(x: torch.Tensor, net: Net = world.net, varied: bool = varied) -> torch.Tensor:
            if varied and kind == "checkpointing":
                for block in net.layers:
                    x = x + checkpoint(block, x, use_reentrant=False)
                return x
            if varied and kind == "evaluation":
                before = recorded(net), amaxes(net)
                with torch.no_grad():
                    net(x * 100)
                with torch.inference_mode():
                    net(x * 100)
                assert (recorded(net), amaxes(net)) == before
            return net(x)

        losses = []
        torch.manual_seed(1)
        for _ in range(6):
            loss = forward(world.mine(torch.randn(4, 8, 64))).square().mean()
            loss.backward()
            losses.append(loss.item())
            if len(losses) % 2 == 0:
                sync(world.net)
        gradients = [full(p.grad) for p in world.net.parameters()]
        results.append((losses, gradients, amaxes(world.net)))
    (losses, gradients, kept), (same_losses, same_gradients, same_kept) = results
    return (
        losses == same_losses
        and kept == same_kept
        and all(map(same_bits, gradients, same_gradients))
    )


@pytest.mark.parametrize("kind", ["evaluation", "checkpointing", "high-precision gather"])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_what_changes_nothing(ranks: RankPools, dp: int, tp: int, kind: str) -> None:
    assert ranks(dp * tp).run(variation, dp, tp, kind) == [True] * (dp * tp)
