"""Delayed scales on several ranks: one all-reduce per step, and the operands of one process."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from delayed_steps import DELAYED, amaxes, audited_steps, histories, recorded
from nets import Distributed, full
from ranks import RankPools
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

from fp8_dist import sync_float8_amax_and_scale_history as sync
from fp8_dist.debug import comm_audit

INT32 = torch.int32  # an amax travels as the bits of a non-negative float


def histories_of_steps(dp: int, tp: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """After three steps with changing weights, on the mesh and on one device."""
    # One MLP: the next one's input has other bits, if sums are taken in another order.
    world = Distributed(dp, tp, config=DELAYED, net_arguments={"layers": 1})
    for step in range(3):
        x, grad = (torch.randn(4, 8, 64) * (step + 1) for _ in range(2))
        world.net(world.mine(x).requires_grad_()).backward(world.mine(grad))
        # Dynamic scales are those of each data-parallel rank's batch, delayed ones of them all.
        parts = 1 if step else dp
        for x_part, grad_part in zip(x.chunk(parts), grad.chunk(parts), strict=True):
            world.twin(x_part.requires_grad_()).backward(grad_part)
        for net in (world.net, world.twin):
            sync(net)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(1.5)
    found = {
        name.replace("prepared_input", "input"): h for name, h in amaxes(world.net).items() if h
    }
    return found, amaxes(world.twin)


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_histories_are_those_of_one_device(ranks: RankPools, dp: int, tp: int) -> None:
    for found, expected in ranks(dp * tp).run(histories_of_steps, dp, tp):
        assert found == {name: expected[name] for name in found}
        assert len(found) == (9 if tp == 1 else 8)  # one for w1 and w3 where TP prepares it


def audited(dp: int, tp: int) -> tuple[list[int], Counter[str]]:
    """Amax all-reduces of three steps of two micro-batches, and the gathered bytes of the last."""
    world = Distributed(dp, tp, config=DELAYED)
    optimizer = torch.optim.AdamW(world.net.parameters())
    reduces = []
    for _ in range(3):
        with comm_audit(world.mesh) as step:
            for _ in range(2):
                world.net(world.mine(torch.randn(4, 8, 64))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with comm_audit(world.mesh) as end:
            sync(world.net)
        reduces.append(step.count("all_reduce", dtype=INT32))
        assert end.count() == end.count("all_reduce", dtype=INT32) == 1
        assert sum(row.elements for row in end.rows) == len(histories(world.net))
    gathered = Counter[str]()
    for row in step.rows:
        gathered[f"{row.dtype} over {row.axis}"] += row.bytes * (row.op == "all_gather")
    return reduces, +gathered


@pytest.mark.parametrize(("dp", "tp", "first"), [(2, 1, 6), (1, 2, 26), (2, 2, 26)])
def test_no_amax_travels_after_the_first_step(
    ranks: RankPools, dp: int, tp: int, first: int
) -> None:
    reduces, gathered = ranks(dp * tp).run_same(audited, dp, tp)
    assert reduces == [first, 0, 0]
    if dp == tp:
        assert gathered == {
            "torch.float8_e4m3fn over dp": 73_728,
            "torch.float32 over dp": 3_584,
            "torch.float8_e4m3fn over tp": 4_096,
            "torch.float8_e5m2 over tp": 4_096,
        }


def offloaded() -> bool:
    found = []
    for arguments in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        world = Distributed(2, 1, config=DELAYED, fsdp_arguments=arguments)
        x = world.mine(torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(1)))
        found.append(audited_steps(world.net, x, world.mesh)["amaxes"])
    return found[0] == found[1]


def test_cpu_offload(ranks: RankPools) -> None:
    assert ranks(2).run(offloaded) == [True, True]


def poisoned(where: str) -> dict[str, Any]:
    """A NaN on rank 0 alone, in a step whose scales come from the history."""
    world = Distributed(2, 2, config=DELAYED)
    x = world.mine(torch.randn(4, 8, 64))
    for _ in range(2):
        world.net(x).square().mean().backward()
        sync(world.net)
    before = amaxes(world.net)
    spoiled = x if where == "input" else world.net.layers[0].w1.weight.to_local()
    with torch.no_grad():
        if dist.get_rank() == 0:
            spoiled.view(-1)[0] = torch.nan
    world.net.zero_grad()
    output = world.net(x)
    output.square().mean().backward()
    with torch.no_grad():
        if dist.get_rank() == 0 and where == "weight":
            spoiled.view(-1)[0] = 0.0
    sync(world.net)
    after = amaxes(world.net)
    return {
        "output": bool(output.isnan().any()),
        "gradients": all(bool(full(p.grad).isnan().any()) for p in world.net.parameters()),
        "histories": all(max(after[n]) == max(v) for n, v in before.items() if v),
        "next": bool(world.net(x.nan_to_num()).isfinite().all()),
    }


@pytest.mark.parametrize("where", ["input", "weight"])
def test_a_nan_on_one_rank(ranks: RankPools, where: str) -> None:
    for rank, found in enumerate(ranks(4).run(poisoned, where)):
        # Data-parallel ranks have inputs of their own, and share weights and their gradients.
        assert found.pop("output") is (where == "weight" or rank < 2), rank
        assert found == {"gradients": True, "histories": True, "next": True}


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


def trained(kind: str) -> list[Any]:
    """Losses, gradients and histories of six micro-batches and three syncs."""
    world = Distributed(2, 2, config=DELAYED, gather=kind != "high-precision gather")
    net = world.net

    def forward(x: torch.Tensor) -> torch.Tensor:
        if kind == "checkpointing":
            for block in net.layers:
                x = x + checkpoint(block, x, use_reentrant=False)
            return x
        if kind == "evaluation":
            before = recorded(net), amaxes(net)
            with torch.no_grad():
                net(x * 100)
            with torch.inference_mode():
                net(x * 100)
            assert (recorded(net), amaxes(net)) == before
        return net(x)

    losses = []
    torch.manual_seed(1)
    for number in range(6):
        loss = forward(world.mine(torch.randn(4, 8, 64))).square().mean()
        loss.backward()
        losses.append(loss.item())
        if number % 2:
            sync(net)
    gradients = [full(p.grad).view(torch.int32).tolist() for p in net.parameters()]
    return [losses, gradients, amaxes(net)]


def test_what_changes_nothing(ranks: RankPools) -> None:
    expected = ranks(4).run(trained, "nothing")
    for kind in ("evaluation", "checkpointing", "high-precision gather"):
        assert ranks(4).run(trained, kind) == expected, kind
