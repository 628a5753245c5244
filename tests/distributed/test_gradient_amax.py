"""Amaxes of output gradients, reduced together: bits as if each was reduced alone, in any backward."""

import math
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import full
from ranks import RankPools, device_mesh
from reference import same_bits
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)
from fp8_dist.debug import comm_audit
from fp8_dist.linear import autograd
from fp8_dist.linear.recording import record_gemms
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    PrepareFloat8ModuleInput,
    apply_tp_plan,
)

INT32 = torch.int32


class Projections(nn.Module):
    """Several layers that take one input; the second has a bias."""

    def __init__(self, widths: tuple[int, ...], dim: int = 16) -> None:
        super().__init__()
        for i, width in enumerate(widths):
            setattr(self, f"layer{i}", nn.Linear(dim, width, bias=i == 1))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) * (i + 1) for i, layer in enumerate(self.children())]


def projections(tp: int, widths: tuple[int, ...]) -> Projections:
    torch.manual_seed(0)
    net = Projections(widths)
    convert_to_float8_training(net, config=Float8LinearConfig(pad_inner_dim=True))
    plan: dict[str, Any] = {name: Float8ColwiseParallel() for name, _ in net.named_children()}
    prepare = PrepareFloat8ModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    )
    root = nn.ModuleDict({"block": net})
    named = {f"block.{name}": style for name, style in plan.items()}
    apply_tp_plan(root, device_mesh(tp=tp), {"block": prepare, **named})
    return net


@contextmanager
def one_by_one():  # type: ignore[no-untyped-def]
    """No amax is found ahead of the GEMMs."""
    siblings, autograd._siblings = autograd._siblings, lambda *_: None
    try:
        yield
    finally:
        autograd._siblings = siblings


Backward = Callable[[Projections, torch.Tensor], None]


def every(net: Projections, x: torch.Tensor) -> None:
    sum(y.square().sum() for y in net(x)).backward()


def last_alone(net: Projections, x: torch.Tensor) -> None:
    net(x)[-1].square().sum().backward()


def first_alone_then_every(net: Projections, x: torch.Tensor) -> None:
    outputs = net(x)
    outputs[0].square().sum().backward(retain_graph=True)
    sum(y.square().sum() for y in outputs).backward()


def bias_alone_then_every(net: Projections, x: torch.Tensor) -> None:
    outputs = net(x)
    losses = [y.square().sum() for y in outputs]
    torch.autograd.grad(losses[1], net.layer1.bias, retain_graph=True)  # type: ignore[union-attr]
    sum(losses).backward()


def one_after_another(net: Projections, x: torch.Tensor) -> None:
    """Each output depends on the one before, so the gradients come one by one."""
    outputs, total = net(x), torch.zeros(())
    for y in outputs:
        total = (total + 1).tanh() * y.square().sum()
    total.backward()


def checkpointed(net: Projections, x: torch.Tensor) -> None:
    sum(y.square().sum() for y in checkpoint(net, x, use_reentrant=False)).backward()


def checkpointed_reentrant(net: Projections, x: torch.Tensor) -> None:
    outputs = checkpoint(lambda x: tuple(net(x)), x, use_reentrant=True)
    sum(y.square().sum() for y in outputs).backward()


def nan_in_one(net: Projections, x: torch.Tensor) -> None:
    outputs = net(x)
    losses = [y.square().sum() for y in outputs]
    (losses[0] + losses[1] * math.nan + losses[-1]).backward()


def frozen(net: Projections, x: torch.Tensor) -> None:
    net.layer0.weight.requires_grad_(False)  # type: ignore[union-attr]
    every(net, x)


def twice(net: Projections, x: torch.Tensor) -> None:
    """Two forwards before one backward."""
    first, second = net(x), net(x * 2)
    sum(y.square().sum() for y in (*first, *second)).backward()


def gradients(
    tp: int, backward: Backward, widths: tuple[int, ...], length: int
) -> tuple[list[torch.Tensor], int]:
    """Gradients and operands of the GEMMs, and the amax all-reduces of the backward."""
    net = projections(tp, widths)
    mesh = device_mesh(tp=tp)
    precompute_float8_dynamic_scale(net)
    # A DTensor knows the lengths of uneven shards.
    x = distribute_tensor(torch.randn(2, length, 16), mesh, [Shard(1)]).requires_grad_()
    with comm_audit(mesh) as audit, record_gemms() as gemms:
        backward(net, x)
    found = [full(p.grad) for p in net.parameters() if p.grad is not None]
    multiplied = [
        part
        for gemm in gemms
        for each in (gemm.a, gemm.b)
        for part in (each.qdata.view(torch.uint8), each.scale)
    ]
    return [full(x.grad), *found, *multiplied], audit.count("all_reduce", dtype=INT32)


def together_and_alone(
    tp: int, backward: Backward, widths: tuple[int, ...], length: int
) -> tuple[bool, int, int]:
    """Whether all bits agree, and how many amaxes are reduced together and alone."""
    torch.manual_seed(1)
    ours, few = gradients(tp, backward, widths, length)
    torch.manual_seed(1)
    with one_by_one():
        theirs, many = gradients(tp, backward, widths, length)
    same = len(ours) == len(theirs) and all(map(same_bits, ours, theirs))
    return same, few, many


@pytest.mark.parametrize(
    ("backward", "few", "many"),
    [
        # One of the all-reduces is the input's, and one more for each forward that runs again.
        (every, 2, 4),
        (last_alone, 2, 2),
        (first_alone_then_every, 3, 5),
        (bias_alone_then_every, 2, 4),
        (one_after_another, 2, 4),
        (checkpointed, 3, 5),
        (checkpointed_reentrant, 3, 5),
        (nan_in_one, 2, 4),
        (frozen, 2, 4),
        (twice, 4, 8),
    ],
)
@pytest.mark.parametrize("tp", [2, 3])
def test_as_if_each_was_reduced_alone(
    ranks: RankPools, tp: int, backward: Backward, few: int, many: int
) -> None:
    # 7 positions and 12 or 24 columns: uneven shards.
    found = ranks(tp).run(together_and_alone, tp, backward, (24, 12, 24), 7)
    assert found == [(True, few, many)] * tp


def test_ranks_without_columns_and_positions(ranks: RankPools) -> None:
    found = ranks(4).run(together_and_alone, 4, every, (16, 3, 2), 3)
    assert found == [(True, 2, 4)] * 4


def test_many_siblings(ranks: RankPools) -> None:
    found = ranks(2).run(together_and_alone, 2, every, (4,) * 16, 4)
    assert found == [(True, 2, 17)] * 2
