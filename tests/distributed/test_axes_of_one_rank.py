"""Gradients of layers and experts on meshes of every shape, with any axes of one rank."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from expecttest import assert_expected_inline
from nets import full
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, sqnr
from torch import Tensor
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from fp8_dist import Float8LinearConfig, convert_to_float8_training
from fp8_dist.fsdp import average_gradients_over, set_gradient_transport
from fp8_dist.moe import convert_experts_to_float8_training, dispatch_linear, linear_combine, route
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    Float8ExpertParallel,
    Float8RowwiseParallel,
    apply_tp_plan,
)

DIM, EXPERTS, TOKENS = 32, 4, 12
AXES = ("replicate", "shard", "ep", "tp")
Shape = dict[str, int]


class Experts(nn.Module):
    float8_weight_names = ("up", "down")

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * DIM, DIM) / 6)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * DIM) / 6)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(2 * len(x)).view(-1, 2) % EXPERTS
        group = self.up.device_mesh.get_group() if isinstance(self.up, DTensor) else None
        routing, config = route(ids, EXPERTS, group), self.float8_experts_config
        hidden = dispatch_linear(x, self.up, routing, config).relu()
        return linear_combine(hidden, self.down, routing, config).sum(1)


class Net(nn.Module):
    """Two layers, experts, and a head in high precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.experts, self.head = Experts(), nn.Linear(DIM, 8)
        config = Float8LinearConfig.from_recipe_name("rowwise_folded")
        convert_to_float8_training(
            self, config=config, module_filter_fn=lambda _, fqn: fqn != "head"
        )
        convert_experts_to_float8_training(self)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(self.first(x).relu())
        return self.head(x + self.experts(x))


def shapes(ranks: int) -> Iterator[Shape]:
    """All meshes of HSDP, EP and TP, and of FSDP2, EP and TP."""
    for axes in (AXES, AXES[1:]):
        for sizes in itertools.product([1, 2, 4], repeat=len(axes)):
            if math.prod(sizes) == ranks:
                yield dict(zip(axes, sizes, strict=True))


class Way(NamedTuple):
    """A transport of gradients, the dtype in which they are reduced, and the setters in use."""

    transport: Any = None
    reduce_dtype: torch.dtype = torch.float32
    by_hand: bool = False
    tolerance: float = 100  # the SQNR, where sums are taken in another order


SUMS = [Way(), Way(by_hand=True)]
# FSDP2 reduces nothing over one rank; with more, other tests compare these.
OVER_ONE_RANK = [
    Way(reduce_dtype=torch.float16, tolerance=50),
    Way(reduce_dtype=torch.float16, by_hand=True, tolerance=50),
    Way("fp32"),
    Way("bf16", by_hand=True, tolerance=40),
    Way("float8", tolerance=25),
]


def divide_by_hand(module: Any, ranks: int) -> None:
    module.set_gradient_divide_factor(float(ranks))
    module.set_force_sum_reduction_for_comms(True)


def distributed(shape: Shape, way: Way) -> Any:
    mesh, net = device_mesh(**shape), Net()
    how: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=way.reduce_dtype)}
    plan = {"first": Float8ColwiseParallel(), "second": Float8RowwiseParallel()}
    apply_tp_plan(net, mesh["tp"], plan)
    parallelize_module(net.experts, mesh["ep"], Float8ExpertParallel())
    replicas = [axis for axis in AXES[:1] if axis in shape]
    mesh["shard", "ep"]._flatten("shard_ep")
    fully_shard(net.experts, mesh=mesh[*replicas, "shard"], **how)
    for module in (net.first, net):
        fully_shard(module, mesh=mesh[*replicas, "shard_ep"], **how)
    data = mesh[*replicas, "shard", "ep"]
    for module in (net.experts, net.first):
        if way.by_hand:
            divide_by_hand(module, data.size())
        else:
            average_gradients_over(module, data)
    if way.transport is not None:
        set_gradient_transport(net, way.transport)
    return net


def batch(number: int) -> Tensor:
    return torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(number))


def differences(shape: Shape, way: Way, expected: dict[str, Tensor]) -> list[str]:
    """The parameters whose gradients differ from those of one device, in two micro-batches."""
    net, ranks = distributed(shape, way), dist.get_world_size() // shape["tp"]
    own = dist.get_rank() // shape["tp"]
    for i in range(2):
        net.set_requires_all_reduce(i == 1)
        net(batch(own + i * ranks)).square().mean().backward()
    found = {n: full(p.grad) for n, p in net.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    return [
        f"{shape} {way}: {name} {(each.norm() / expected[name].norm()).item():.4f}"
        for name, each in found.items()
        if sqnr(expected[name], each) < way.tolerance
    ]


def gradients_of_one_device(ranks: int) -> dict[str, Tensor]:
    net = Net()
    for number in range(2 * ranks):
        (net(batch(number)).square().mean() / ranks).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("way", [*SUMS, *OVER_ONE_RANK], ids=lambda way: f"{way[:3]}")
@on_ranks("size", returns=[])
def test_gradients_on_meshes_of_every_shape(size: int, way: Way) -> list[str]:
    expected = {n: gradients_of_one_device(n) for n in (1, 2, 4) if n <= size}
    return [
        text
        for shape in shapes(size)
        if way in SUMS or shape["shard"] == shape["tp"] == 1
        for text in differences(shape, way, expected[size // shape["tp"]])
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@on_ranks(2, returns=[])
def test_gradients_of_other_dtypes(dtype: torch.dtype) -> list[str]:
    """A factor of 3 in plain modules, sharded over one rank, or whole on each."""
    wrong, mesh = [], device_mesh(dp=2, one=1)
    ways: list[tuple[Callable[..., Any], DeviceMesh, int]] = [
        (fully_shard, mesh["one"], 1),
        (fully_shard, mesh, 2),
        (replicate, mesh["dp"], 2),
    ]
    for (wrap, over, ranks), by_hand in itertools.product(ways, [False, True]):
        net: Any = nn.Linear(8, 4, bias=False, dtype=dtype)
        wrap(net, mesh=over)
        net.set_gradient_divide_factor(3.0)
        if by_hand or (ranks == 2 and dtype in (torch.float32, torch.bfloat16)):
            net.set_force_sum_reduction_for_comms(True)  # gloo has no other way to divide
        net(torch.full((6, 8), 0.5, dtype=dtype)).sum().backward()
        if not torch.allclose(full(net.weight.grad), torch.full((), ranks * 1.0, dtype=dtype)):
            wrong.append(f"{wrap.__name__} {over} {by_hand}: {full(net.weight.grad)[0, 0]}")
    return wrong


def refused() -> str:
    mesh, net = device_mesh(dp=2, ep=2), Net()
    call: Any = average_gradients_over
    parallelize_module(net.experts, mesh["ep"], Float8ExpertParallel())
    texts = [
        raised(TypeError, lambda: call(None, mesh)),
        raised(ValueError, lambda: call(net.experts, mesh)),
        raised(ValueError, lambda: call(net.head, mesh)),
    ]
    fully_shard(net.experts, mesh=mesh["dp"])
    empty = fully_shard(nn.Sequential(net.experts), mesh=mesh["dp"])
    texts += [
        raised(TypeError, lambda: call(net.experts, 4)),
        raised(ValueError, lambda: call(net.experts, mesh["ep"])),
        raised(ValueError, lambda: call(empty, mesh)),
    ]
    assert isinstance(net.experts, FSDPModule)
    return "\n".join(texts)


def test_what_is_refused(ranks: RankPools) -> None:
    first, *_ = ranks(4).run(refused)
    assert_expected_inline(
        first,
        """\
expected a model (an nn.Module), got a NoneType
average_gradients_over: fully_shard was not called on experts, so FSDP2 does not reduce its gradients; call fully_shard on that module before
average_gradients_over: fully_shard was not called on a Linear, so FSDP2 does not reduce its gradients; call fully_shard on that module before
average_gradients_over: experts was given 4 instead of a DeviceMesh; pass the mesh of all ranks that have batches of their own, such as mesh["dp", "ep"]
average_gradients_over: FSDP2 reduces the gradients of experts over ranks [0, 2], and the mesh has ranks [0, 1]; pass the mesh of all ranks that have batches of their own, such as mesh["dp", "ep"]
average_gradients_over: an FSDPSequential has no parameters outside of other FSDP modules in it; pass those""",
    )
