"""Gradients of DDP on the wire, in float8: their bits, their bytes, and what else DDP does."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from documented import run_shown
from expecttest import assert_expected_inline
from gradient_wire import Uneven, backward, data, on_the_wire
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, sqnr
from torch.nn.parallel import DistributedDataParallel

from fp8_dist import (
    Float8LinearConfig,
    Float8State,
    attach_update,
    convert_to_float8_training,
    float8_layers,
)
from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import Float8DDPState, float8_ddp_hook

Gradients = dict[str, torch.Tensor]
TINY = 0.02  # MB: three buckets of Uneven


class Whole(Uneven):
    """All parts are used, and a parameter of no elements."""

    def __init__(self, empty: bool = True) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 5)) if empty else None

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        y = super().forward(x, spare)
        return y if self.empty is None else y + self.empty.sum()


def in_ddp(module: nn.Module, hook: bool = True, state: Any = None, **how: Any) -> Any:
    model = DistributedDataParallel(module, **how)
    if hook:
        model.register_comm_hook(state, float8_ddp_hook)
    return model


def gradients_of(net: nn.Module) -> Gradients:
    named = net.module if isinstance(net, DistributedDataParallel) else net
    return {name: p.grad for name, p in named.named_parameters() if p.grad is not None}


def mean_on_the_wire(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The mean as all ranks have it: encoded summands, an fp32 sum in order, an encoded mean."""
    ranks, size = len(gradients), gradients[0].numel()
    share = -(-size // ranks)
    found = []
    for owner in range(ranks):
        total = torch.zeros(max(0, min(share, size - owner * share)))
        for rank, gradient in enumerate(gradients):
            piece = gradient.flatten()[owner * share : (owner + 1) * share].float()
            total += piece if rank == owner or not len(piece) else on_the_wire(piece, "float8")
        mean = total / ranks
        found.append(on_the_wire(mean, "float8") if len(mean) else mean)
    return torch.cat(found).view_as(gradients[0])


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "buckets": {"bucket_cap_mb": TINY},  # rebuilt for the second step
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": TINY},
    "unused": {"find_unused_parameters": True, "bucket_cap_mb": TINY},
    "static": {"static_graph": True},
}


def wrong_bits(dtype: torch.dtype) -> list[str]:
    """Parameters whose gradient is not the mean that was computed apart, in any of two steps."""
    own, wrong = dist.get_rank(), []
    for way, how in WAYS.items():
        net = in_ddp(Whole().to(dtype), **how)
        for step in range(2):
            # "unused": the spare part by any rank, then by all but one.
            spare = [way != "unused" or bool(step and r) for r in range(dist.get_world_size())]
            each = []
            for rank, uses_spare in enumerate(spare):
                alone = Whole().to(dtype)
                backward(alone, rank, step, spare=uses_spare)
                each.append(gradients_of(alone))
            net.zero_grad()
            backward(net, own, step, spare=spare[own])
            found = gradients_of(net)
            assert found.keys() == {name for some in each for name in some}, (way, found.keys())
            for name, grad in found.items():
                of_ranks = [some.get(name, torch.zeros_like(grad)) for some in each]
                expected = mean_on_the_wire(of_ranks).to(dtype)
                wrong += [f"{way}: {name}"] * (not torch.equal(grad, expected))
    return wrong


@pytest.mark.parametrize(
    ("world_size", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (4, torch.float16)]
)
def test_gradients_are_the_means_of_what_arrived(
    ranks: RankPools, world_size: int, dtype: torch.dtype
) -> None:
    assert ranks(world_size).run(wrong_bits, dtype) == [[]] * world_size


def train(net: nn.Module, steps: int) -> None:
    """Steps of ranks whose data differ."""
    optimizer, rank = torch.optim.AdamW(net.parameters(), lr=1e-2), dist.get_rank()
    if float8_layers(net):
        attach_update(optimizer, net)
    for step in range(steps):
        x = data(0, 1000 + dist.get_world_size() * step + rank)
        (net(x).float()[:, :96] - x.tanh()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same_parameters(net: nn.Module) -> bool:
    bits = torch.cat([p.detach().flatten() for p in net.parameters()])
    everywhere = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, bits)
    return all(torch.equal(bits, each) for each in everywhere)


def of_float8(recipe: str = "tensorwise") -> nn.Module:
    config = Float8LinearConfig.from_recipe_name(recipe)
    net = Whole(empty=False)
    return convert_to_float8_training(net, config=config, module_filter_fn=_is_wide)


def _is_wide(module: nn.Module, name: str) -> bool:
    return name in ("last", "spare", "wide")


@on_ranks(3, returns=True)
def test_parameters_stay_equal_on_ranks() -> bool:
    """After 3 steps; also where some ranks, or all, do not use a part of the model."""
    found, rank = [], dist.get_rank()
    for make in (Whole, of_float8):
        net = in_ddp(make(), True, Float8DDPState(None, True), bucket_cap_mb=TINY)
        train(net, 3)
        found.append(same_parameters(net))
    state, how = Float8DDPState(None, 3), {"find_unused_parameters": True}
    net = in_ddp(Whole(), True, state, **how, bucket_cap_mb=TINY)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        backward(net, rank, step, spare=step < 2 and (step + rank) % 2 == 0)
        optimizer.step()
        optimizer.zero_grad()
    return all([*found, same_parameters(net)])


def wire(bucket_cap_mb: float) -> str:
    """The collectives of a backward, and their bytes against a ring's all-reduce in bf16."""
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))
    mesh, elements = device_mesh(dp=2), sum(p.numel() for p in model.parameters())
    net = in_ddp(model, bucket_cap_mb=bucket_cap_mb)
    for _ in range(3):  # the second forward rebuilds the buckets
        with comm_audit(mesh) as audit:
            net(torch.randn(4, 256)).sum().backward()
    rows = [f"{r.op} {r.dtype} over {r.axis}: {r.count}, {r.bytes:,} B\n" for r in audit.rows]
    # A rank sends (W - 1) / W of each message; a ring's all-reduce sends that of 2 x 2 bytes.
    ratio = sum(r.bytes for r in audit.rows) / (4 * elements)
    assert ratio <= 0.51
    return "".join(rows) + f"{ratio:.4f}\n"


def test_bytes(ranks: RankPools) -> None:
    assert_expected_inline(
        "2 buckets\n".join(ranks(2).run_same(wire, cap) for cap in (25, 0.4)),
        """\
all_to_all torch.float8_e4m3fn over dp: 1, 262,912 B
all_to_all torch.uint8 over dp: 0, 2,054 B
all_gather torch.float8_e4m3fn over dp: 1, 262,912 B
all_gather torch.uint8 over dp: 0, 2,054 B
0.5039
2 buckets
all_to_all torch.float8_e4m3fn over dp: 1, 131,328 B
all_to_all torch.uint8 over dp: 0, 1,026 B
all_gather torch.float8_e4m3fn over dp: 1, 131,328 B
all_gather torch.uint8 over dp: 0, 1,026 B
all_to_all torch.float8_e4m3fn over dp: 1, 131,584 B
all_to_all torch.uint8 over dp: 0, 1,028 B
all_gather torch.float8_e4m3fn over dp: 1, 131,584 B
all_gather torch.uint8 over dp: 0, 1,028 B
0.5039
""",
    )


@on_ranks(3)
def test_accuracy() -> None:
    exact, net = in_ddp(Whole(empty=False), False), in_ddp(Whole(empty=False))
    for each in (exact, net):
        backward(each, dist.get_rank())
    found = gradients_of(net)
    assert min(sqnr(grad, found[name]) for name, grad in gradients_of(exact).items()) > 28


@on_ranks(2)
def test_stochastic_rounding_has_no_bias() -> None:
    """Neither of summands nor of means: one rank has a gradient, of one value for each row.

    So the first half of the mean is rounded once by its owner, the second once by its sender.
    """
    factor = 2.0 * (dist.get_rank() == 0)
    values = 1 + torch.rand(16, 1, generator=torch.Generator().manual_seed(0)).expand(16, 1024)

    def bias(stochastic: bool) -> float:
        total = torch.zeros(16, 1024)
        for seed in range(16):
            layer = nn.Linear(1024, 16, bias=False)
            state = Float8DDPState(stochastic_rounding=seed if stochastic else False)
            net = in_ddp(layer, True, state)
            net(torch.eye(1024)).mul(factor * values.t()).sum().backward()
            total += layer.weight.grad  # type: ignore[operator]
        of_halves = (total / 16 / values - 1).view(2, 8, 1024).mean(-1).abs()
        return of_halves.max().item()

    assert bias(True) < 0.002  # four standard deviations
    assert bias(False) > 0.01


@on_ranks(2)
def test_what_is_not_finite_arrives_everywhere() -> None:
    net = in_ddp(nn.Linear(160, 9, bias=False), True)
    for special in (True, False):
        net.zero_grad()
        x = data(0)[:1].repeat(1, 2)[:, :160].clone()
        if special and dist.get_rank() == 0:
            x[0, 3], x[0, 5], x[0, 130] = math.nan, math.inf, -math.inf
        net(x).sum().backward()
        grad = net.module.weight.grad
        if special:
            assert grad[:, 3].isnan().all()
            assert (grad[:, 5] == math.inf).all()
            assert (grad[:, 130] == -math.inf).all()
            grad = torch.cat([grad[:, :3], grad[:, 6:130], grad[:, 131:]], -1)
        assert grad.isfinite().all()


@on_ranks(2)
def test_with_what_else_is_done() -> None:
    """Accumulation with and without no_sync; ranks with fewer batches; compiled code."""
    rank = dist.get_rank()

    def micro_batches(net: Any) -> None:
        with net.no_sync():
            backward(net, rank)
        backward(net, rank, 1)

    def accumulated(net: Any) -> None:
        for step in range(2):
            backward(net, rank, step)

    def joined(net: Any) -> None:
        with net.join():
            for step in range(1 + rank):
                net.zero_grad()
                backward(net, rank, step)

    def compiled(net: Any) -> None:
        torch._dynamo.reset()
        backward(torch.compile(net, backend="aot_eager"), rank)

    ways: list[Callable[[Any], None]] = [micro_batches, accumulated, joined, compiled]
    for way in ways:
        for views in (False,) if way is compiled else (False, True):
            found = []
            for hook in (False, True):
                cap = 25 if way is compiled else TINY  # torch splits graphs by larger buckets
                net = in_ddp(
                    Whole(empty=False), hook, gradient_as_bucket_view=views, bucket_cap_mb=cap
                )
                way(net)
                found.append(gradients_of(net))
            exact, ours = found
            lowest = min(sqnr(grad, ours[name]) for name, grad in exact.items())
            assert lowest > 25, (way, views, lowest)


@on_ranks(1)
def test_one_rank_rounds_nothing() -> None:
    alone, net = Whole(), in_ddp(Whole(), True, Float8DDPState(None, True))
    for each in (alone, net):
        backward(each, 0)
    assert all(map(torch.equal, gradients_of(net).values(), gradients_of(alone).values()))


@on_ranks(1)
def test_a_state_has_no_names_of_wrappers() -> None:
    net = of_float8("delayed")
    expected = Float8State(net).state_dict()
    for wrapped in (in_ddp(net), torch.compile(in_ddp(net))):
        assert Float8State(wrapped).state_dict() == expected != {}


@on_ranks(2)
def test_the_page_registers_it() -> None:
    page = (Path(__file__).parents[2] / "docs/fsdp2.md").read_text()
    (code,) = re.findall(r"^```python\n([^`]*register_comm_hook[^`]*)^```", page, re.M)
    scope: dict[str, Any] = {"model": of_float8()}
    run_shown(code, scope)
    train(scope["model"], 2)
    assert same_parameters(scope["model"])


@on_ranks(2)
def test_refusals() -> None:
    def text(kind: type[Exception], net: Any, x: torch.Tensor) -> str:
        return raised(kind, net(x).sum().backward)

    x = torch.ones(2, 8)
    wrong = in_ddp(nn.Linear(8, 8), True, dist.group.WORLD)
    assert "the state is a ProcessGroup; pass a Float8DDPState, or None, to" in text(
        TypeError, wrong, x
    )
    double = text(NotImplementedError, in_ddp(nn.Linear(8, 8).double()), x.double())
    assert "float8_ddp_hook: bucket 0 has gradients of torch.float64, torch.strided; sums" in double
    sparse = nn.Embedding(8, 8, sparse=True)
    assert "torch.sparse_coo; sums are taken in fp32 of dense gradients in fp32" in text(
        NotImplementedError, in_ddp(sparse), torch.arange(4)
    )
    state: Any = Float8DDPState
    message = raised(TypeError, lambda: state(True))
    assert message.startswith(
        "Float8DDPState: process_group is True; pass the ProcessGroup that DDP"
    )
    message = raised(ValueError, lambda: state(stochastic_rounding=-1))
    assert message.startswith("Float8DDPState: stochastic_rounding is -1; it must be a bool, or a")
