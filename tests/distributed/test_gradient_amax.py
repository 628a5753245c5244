"""Amaxes of output gradients, reduced together: bits as if each was reduced alone, in any backward."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from nets import full
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import same_bits
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)
from fp8_dist.debug import comm_audit
from fp8_dist.linear import autograd
from fp8_dist.linear.observing import record_gemms
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    PrepareFloat8ModuleInput,
    apply_tp_plan,
)

INT32 = torch.int32


# Where no amax is found ahead of the GEMMs.
ALONE = mock.patch.object(autograd, "_gradient_amax", return_value=None)


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
    prepare = PrepareFloat8ModuleInput(
        input_layouts=(Shard(1),),
        desired_input_layouts=(Replicate(),),
        fwd_config_submodule_fqn="layer0",  # the others are siblings all the same
    )
    columns = {f"block.{name}": Float8ColwiseParallel() for name, _ in net.named_children()}
    apply_tp_plan(nn.ModuleDict({"block": net}), device_mesh(tp=tp), {"block": prepare, **columns})
    return net


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


def more_nodes_on_a_rank(net: Projections, x: torch.Tensor) -> None:
    """On rank 1 around layers, before them, and of a backward hook."""
    if dist.get_rank() == 1:
        net.layer0.register_forward_hook(lambda m, a, y: (y * 2) / 2)
        net.layer1.register_forward_pre_hook(lambda m, a: tuple(x.view_as(x) for x in a * 1))
        net.register_full_backward_hook(lambda m, gx, gy: None)
        x = (x * 2) / 2
    every(net, x)


def forward_in_a_thread(net: Projections, x: torch.Tensor) -> None:
    """On rank 1 in a new thread, where autograd counts nodes from 0."""
    with ThreadPoolExecutor() as pool:
        outputs = pool.submit(net, x).result() if dist.get_rank() == 1 else net(x)
    sum(y.square().sum() for y in outputs).backward()


def gemms_of(outputs: list[torch.Tensor]) -> list[GradientEdge]:
    """Where the output gradient enters the GEMMs of each layer."""
    edges = []
    for y in outputs:
        node: Any = y.grad_fn
        while "LinearFunction" not in node.name():
            node = node.next_functions[0][0]
        edges.append(GradientEdge(node, 0))
    return edges


def stopped_at_the_gemms(net: Projections, x: torch.Tensor) -> None:
    """A backward that ends between the amaxes and the GEMMs of a layer; then a whole one."""
    outputs = net(x)
    loss = sum(y.square().sum() for y in outputs)
    torch.autograd.grad(loss, gemms_of(outputs)[:1], retain_graph=True)
    loss.backward()


def started_at_the_gemms(net: Projections, x: torch.Tensor) -> None:
    """One that ends there; then one that starts there, with larger gradients."""
    outputs = net(x)
    edges = gemms_of(outputs)
    loss = sum(y.square().sum() for y in outputs)
    found = torch.autograd.grad(loss, edges, retain_graph=True)
    torch.autograd.backward(edges, [g * 1000 for g in found])


def gradients(
    tp: int,
    backward: Callable[[Projections, torch.Tensor], None],
    widths: tuple[int, ...],
    length: int,
) -> tuple[list[torch.Tensor], int]:
    """Gradients and operands of the GEMMs, and the amax all-reduces of the backward."""
    net, mesh = projections(tp, widths), device_mesh(tp=tp)
    precompute_float8_dynamic_scale(net)
    # A DTensor knows the lengths of uneven shards.
    x = distribute_tensor(torch.randn(2, length, 16), mesh, [Shard(1)]).requires_grad_()
    with comm_audit(mesh) as audit, record_gemms() as gemms:
        backward(net, x)
    found = [full(x.grad), *(full(p.grad) for p in net.parameters() if p.grad is not None)]
    for operand in (each for gemm in gemms for each in (gemm.a, gemm.b)):
        found += [operand.qdata.view(torch.uint8), operand.scale]
    return found, audit.count("all_reduce", dtype=INT32)


WIDTHS = (24, 12, 24)
# One of the all-reduces is the input's, and one more for each forward that runs again.
CASES = {
    # 7 positions and 12 or 24 columns: uneven shards on three ranks.
    2: [
        (every, WIDTHS, 7, 2, 4),
        (every, (4,) * 20, 4, 2, 21),
        (last_alone, WIDTHS, 7, 2, 2),
        (first_alone_then_every, WIDTHS, 7, 3, 5),
        (bias_alone_then_every, WIDTHS, 7, 2, 4),
        (one_after_another, WIDTHS, 7, 2, 4),
        (checkpointed, WIDTHS, 7, 3, 5),
        (checkpointed_reentrant, WIDTHS, 7, 3, 5),
        (nan_in_one, WIDTHS, 7, 2, 4),
        (frozen, WIDTHS, 7, 3, 5),  # its own amax: precompute leaves frozen weights out
        (twice, WIDTHS, 7, 4, 8),
        (more_nodes_on_a_rank, WIDTHS, 8, 2, 4),
        (stopped_at_the_gemms, WIDTHS, 8, 2, 4),
        (started_at_the_gemms, WIDTHS, 8, 5, 4),
    ],
    3: [
        (every, WIDTHS, 7, 2, 4),
        (first_alone_then_every, WIDTHS, 7, 3, 5),
        (nan_in_one, WIDTHS, 7, 2, 4),
        (twice, WIDTHS, 7, 4, 8),
    ],
    4: [(every, (16, 3, 2), 3, 2, 4)],  # ranks without columns and positions
}


@pytest.mark.parametrize("tp", CASES)
def test_as_if_each_was_reduced_alone(ranks: RankPools, tp: int) -> None:
    for backward, widths, length, few, many in CASES[tp]:
        found = ranks(tp).run(together_and_alone, tp, backward, widths, length)
        assert found == [(True, few, many)] * tp, backward


def test_a_rank_whose_forward_has_a_thread_of_its_own(ranks: RankPools) -> None:
    # (What is counted in a thread is not seen from another.)
    found = ranks(2).run(together_and_alone, 2, forward_in_a_thread, WIDTHS, 8)
    assert [same for same, *_ in found] == [True, True]


def more_calls_than_layers(net: Projections, x: torch.Tensor) -> None:
    net.forward = lambda x: [layer(x) for layer in net.children() for _ in range(3)]  # type: ignore[method-assign]
    every(net, x)


@on_ranks(2, returns=(True, 2))
def test_a_layer_called_again() -> tuple[bool, int]:
    """Whether the gradients are close to those of amaxes that are reduced alone; all-reduces."""
    arguments = 2, more_calls_than_layers, (8, 8), 4
    torch.manual_seed(1)
    (gx, *ours), few = gradients(*arguments)
    torch.manual_seed(1)
    with ALONE:
        (gx_alone, *theirs), _ = gradients(*arguments)
    # The order in which gradients of the input are summed is undefined for the last ones.
    torch.testing.assert_close(gx, gx_alone)
    return len(ours) == len(theirs), few


def together_and_alone(*arguments: Any) -> tuple[bool, int, int]:
    """Whether all bits agree, and how many amaxes are reduced together and alone."""
    torch.manual_seed(1)
    ours, few = gradients(*arguments)
    torch.manual_seed(1)
    with ALONE:
        theirs, many = gradients(*arguments)
    same = len(ours) == len(theirs) and all(map(same_bits, ours, theirs))
    return same, few, many


@on_ranks(4, returns=(2, 2))
def test_siblings_on_a_mesh_that_equals_an_earlier_one() -> tuple[int, int]:
    """The amax all-reduces of a backward on either. On the second one DTensor's caches, which look
    a mesh up by equality, give some of the gradients the groups of the first."""
    counts = []
    for width in (24, 12):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
        with mock.patch.dict(globals(), device_mesh=lambda mesh=mesh, **axes: mesh):
            counts.append(gradients(2, every, (24, width, 24), 7)[1])
    return counts[0], counts[1]


class Box:
    """Holds a tensor where FSDP2 doesn't see it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Boxed(nn.Module):
    """A module whose input comes in a box, beside a tensor that FSDP2 sees."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, box: Box, side: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = sum(self.inner(box.x))  # type: ignore[assignment]
        return y.to_local() + side if isinstance(y, DTensor) else y + side


class Outer(nn.Module):
    def __init__(self, boxed: Boxed) -> None:
        super().__init__()
        self.boxed = boxed

    def forward(self, x: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        return self.boxed(Box(x), side)


def fsdp_gradients(
    prepared: str, units: tuple[str, ...], needs_gradient: bool
) -> list[torch.Tensor]:
    """Gradients of column-parallel layers under FSDP2 x TP.

    Args:
        prepared: the module whose input is cast.
        units: the modules that FSDP2 shards, inner ones first.
        needs_gradient: whether the input of the layers does.
    """
    torch.manual_seed(0)
    mesh = device_mesh(dp=2, tp=2)
    root = nn.ModuleDict({"outer": Outer(Boxed(Projections((16, 16, 16))))})
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(root, config=config)
    inner = "outer.boxed.inner"
    prepare = PrepareFloat8ModuleInput(
        input_layouts=(Shard(1), None)[: 1 if prepared == inner else 2],
        desired_input_layouts=(Replicate(), None)[: 1 if prepared == inner else 2],
    )
    columns = {f"{inner}.layer{i}": Float8ColwiseParallel() for i in range(3)}
    apply_tp_plan(root, mesh["tp"], {prepared: prepare, **columns})
    for name in units:
        fully_shard(root.get_submodule(name), mesh=mesh["dp"])
    torch.manual_seed(dist.get_rank() // 2)
    x = torch.randn(2, 4, 16, requires_grad=needs_gradient)
    side = torch.randn(2, 8, 8, requires_grad=True)
    for _ in range(2):
        precompute_float8_dynamic_scale(root)
        root["outer"](x, side).square().sum().backward()
    return [full(p.grad) for p in root.parameters()] + [side.grad]


def same_alone(step: Callable[..., list[torch.Tensor]], *case: Any) -> bool:
    """Whether a step has the same bits if no amax is found ahead of the GEMMs."""
    ours = step(*case)
    with ALONE:
        theirs = step(*case)
    return all(map(same_bits, ours, theirs))


INNER = "outer.boxed.inner"


@pytest.mark.parametrize(
    ("prepared", "units", "needs_gradient"),
    [
        (INNER, (INNER, "outer"), True),
        (INNER, ("outer.boxed", "outer"), False),
        (INNER, ("outer",), True),
        ("outer", ("outer.boxed", "outer"), True),
        ("outer", ("outer.boxed", "outer"), False),
        ("outer", (f"{INNER}.layer1", INNER, "outer"), True),
        ("outer", (f"{INNER}.layer1", INNER, "outer"), False),
        ("outer", ("outer",), False),
    ],
)
def test_fsdp2_frees_weights_after_the_gemms(
    ranks: RankPools, prepared: str, units: tuple[str, ...], needs_gradient: bool
) -> None:
    assert all(ranks(4).run(same_alone, fsdp_gradients, prepared, units, needs_gradient))


class Returning(Projections):
    """Returns its input too, which was cast for it."""

    def forward(self, x: torch.Tensor) -> Any:
        return sum(super().forward(x)), x


class Handing(nn.Module):
    """Hands the input that was cast for one module to another one, which is a unit of FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Returning((16, 16)), Boxed(Projections((16, 16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, cast = self.first(x)
        return y + self.second(Box(cast), y * 0.5)


def handed_on() -> list[torch.Tensor]:
    torch.manual_seed(0)
    mesh = device_mesh(dp=2, tp=2)
    root = nn.ModuleDict({"block": Handing()})
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(root, config=config)
    prepare = PrepareFloat8ModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    )
    modules = ("block.first", "block.second.inner")
    columns = {f"{name}.layer{i}": Float8ColwiseParallel() for name in modules for i in range(2)}
    apply_tp_plan(root, mesh["tp"], {"block.first": prepare, **columns})
    fully_shard(root["block"].second, mesh=mesh["dp"])
    fully_shard(root["block"], mesh=mesh["dp"])
    x = torch.randn(2, 4, 16, requires_grad=True)
    root["block"](x).square().sum().backward()
    return [full(p.grad) for p in root.parameters()]


def test_a_cast_input_that_leaves_its_module(ranks: RankPools) -> None:
    assert all(ranks(4).run(same_alone, handed_on))
