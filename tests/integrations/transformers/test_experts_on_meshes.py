"""Experts on every kind of mesh have the bits of one device, with the same routing.

So do gradients: at most two ranks, or groups of expert parallelism, have nonzero gradients, and the
sum of two numbers does not depend on their order.
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hf_experts import Mixture
from moe_layers import RECIPES
from nets import full
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import same_bits, sqnr
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from fp8_dist import attach_update, precompute_float8_dynamic_scale
from fp8_dist.debug import CommRow, comm_audit
from fp8_dist.fsdp import set_gradient_transport
from fp8_dist.moe import Float8ExpertsConfig
from fp8_dist.tensor_parallel import Float8ExpertParallel

F32 = torch.float32


class Placed(NamedTuple):
    """A distribution of experts.

    Attributes:
        axes: the sizes of the mesh's axes, by name.
        ep: the innermost axes, whose ranks divide the experts.
        shard: the axes of FSDP2, if any. If there are two, the first one replicates (HSDP).
        dim: the dim that FSDP2 shards.
        experts: the number of experts.
    """

    axes: dict[str, int]
    ep: tuple[str, ...] = ()
    shard: tuple[str, ...] = ()
    dim: int = 0
    experts: int = 8

    @property
    def size(self) -> int:
        return math.prod(self.axes.values())

    @property
    def together(self) -> int:
        """The number of ranks of expert parallelism."""
        return math.prod(self.axes[axis] for axis in self.ep)

    def distribute(self, model: Any) -> DeviceMesh:
        """Distribute a model, and its linear layer over all ranks. Gradients are summed."""
        mesh = device_mesh(**self.axes)
        if self.ep:
            ep = mesh[self.ep]._flatten("ep_ranks") if len(self.ep) > 1 else mesh[self.ep]
            parallelize_module(model.experts, ep, Float8ExpertParallel())
        if self.shard:
            fully_shard(
                model.experts, mesh=mesh[self.shard], shard_placement_fn=lambda _: Shard(self.dim)
            )
        fully_shard(
            model,
            mesh=mesh._flatten("every_rank"),
            ignored_params=set() if self.shard else {*model.experts.parameters()},
        )
        for part in (model.experts, model):
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        return mesh


MESHES = {
    "HSDP": Placed({"replicate": 2, "shard": 2}, (), ("replicate", "shard")),
    "6 experts on 4 ranks": Placed({"dp": 4}, (), ("dp",), experts=6),
    "dim 1": Placed({"dp": 4}, (), ("dp",), dim=1),
    "EP over dp x tp": Placed({"dp": 2, "tp": 2}, ("dp", "tp")),
    "EP x FSDP2": Placed({"dp": 2, "ep": 2}, ("ep",), ("dp",), experts=6),
    "EP on 3 ranks": Placed({"ep": 3}, ("ep",), experts=6),
    "EP x HSDP": Placed({"replicate": 2, "shard": 2, "ep": 2}, ("ep",), ("replicate", "shard")),
}
Batch = dict[str, Tensor]


def batches(placed: Placed, seed: int) -> list[Batch]:
    """The tokens and output gradients of each rank. Rank 1 has no tokens."""
    generator, found = torch.Generator().manual_seed(seed), []
    for rank in range(placed.size):
        group, last = rank // placed.together, placed.size // placed.together - 1
        tokens = 0 if rank == 1 else 7 + 5 * rank
        ids = torch.rand(tokens, placed.experts, generator=generator).argsort(1)[:, :2]
        x, grad = (torch.randn(tokens, 160, generator=generator) for _ in range(2))
        weights = torch.rand(tokens, 2, generator=generator)
        found.append({"x": x, "ids": ids, "weights": weights, "grad": grad * (group in (0, last))})
    return found


def run(model: nn.Module, batch: Batch) -> Batch:
    """Run a pass; return the output and the gradients of tokens and routing weights, by name."""
    x, weights = (batch[name].clone().requires_grad_() for name in ("x", "weights"))
    output = model(x, batch["ids"], weights)
    output.backward(batch["grad"])
    assert x.grad is not None
    assert weights.grad is not None
    return {"output": output.detach(), "x": x.grad, "weights": weights.grad}


def on_one_device(
    twin: Any, placed: Placed, parts: Sequence[Batch]
) -> tuple[list[Batch], list[Batch]]:
    """The results for each rank, and the gradients of experts for each EP group."""
    results, grads, size = list[Batch](), list[Batch](), placed.together
    for begin in range(0, placed.size, size):
        group = parts[begin : begin + size]
        twin.zero_grad()
        whole = run(twin, {name: torch.cat([part[name] for part in group]) for name in group[0]})
        each = {name: t.split([len(part["x"]) for part in group]) for name, t in whole.items()}
        results += [{name: split[i] for name, split in each.items()} for i in range(size)]
        grads.append({name: p.grad.clone() for name, p in twin.experts.named_parameters()})
    return results, grads


def total(grads: Sequence[Batch]) -> Batch:
    return {name: reduce(torch.add, [each[name] for each in grads]) for name in grads[0]}


class Steps(NamedTuple):
    """Two steps of two micro-batches each.

    Attributes:
        wrong: the results that differ from one device.
        update, gathers: the all-reduces of a precompute, and the gathers of experts for the first
            micro-batch, each with its dtype, number and elements.
        reduced: the number of amax all-reduces in the steps.
    """

    wrong: list[str]
    update: list[str]
    gathers: list[str]
    reduced: int


def trained(placed: Placed, config: Float8ExpertsConfig, once: bool, updates: bool = True) -> Steps:
    """Train, and compare each step with one device.

    ``once``: whether FSDP2 reduces gradients only once, after both micro-batches. ``updates``:
    whether scales are computed after each step; otherwise forwards compute them.
    """
    rank, reduced = dist.get_rank(), 0
    model, twin = Mixture(config, placed.experts), Mixture(config, placed.experts)
    mesh = placed.distribute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with comm_audit(mesh) as update:
        if updates:
            attach_update(optimizer, model)
            precompute_float8_dynamic_scale(model)
    wrong, gathers = list[str](), list[str]()
    for step in range(2):
        grads = []
        for i in range(2):
            parts = batches(placed, 2 * step + i)
            results, group_results = on_one_device(twin, placed, parts)
            grads.append(group_results)
            model.set_requires_gradient_sync(i == 1 or not once)
            with comm_audit(mesh) as audit:
                found = run(model, parts[rank])
            names = [name for name in found if not same_bits(found[name], results[rank][name])]
            wrong += [f"{step}, {i}: {name}" for name in names]
            rows = audit.without_modules().rows
            own = [row for row in rows if row.op == "all_gather" and row.axis != "world"]
            gathers = gathers or lines(own)
            reduced += sum(row.count for row in rows if row.op == "all_reduce" and row.dtype != F32)
        expected = total([total(each) for each in (zip(*grads, strict=True) if once else grads)])
        for name, parameter in model.experts.named_parameters():
            if not same_bits(full(parameter.grad), expected[name]):
                wrong.append(f"{step}: {name}")
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            twin.get_parameter(name).data.copy_(full(parameter.detach()))
    return Steps(wrong, lines(update.rows), gathers, reduced)


def lines(rows: Sequence[CommRow]) -> list[str]:
    return [f"{str(row.dtype)[6:]} {row.count} x {row.elements}" for row in rows]


# Each mesh with one of the recipes in turn. (test_mesh_grid.py has all pairs for linear layers.)
CASES = [(name, RECIPES[i % 4], i % 2 == 0) for i, name in enumerate(MESHES)]


# Weights are sent as one byte per element; scales with them, or in precompute's all-reduce.
SENT = {
    "HSDP": "['int32 1 x 1'], ['float8_e4m3fn 2 x 737280', 'float32 0 x 5632']",
    "6 experts on 4 ranks": "['int32 1 x 13'], ['float8_e4m3fn 3 x 762880']",
    "dim 1": "['int32 1 x 49'], ['float8_e4m3fn 3 x 762880']",
    "EP over dp x tp": "['int32 1 x 1'], []",
    "EP x FSDP2": "['int32 1 x 2113'], ['float8_e4m3fn 2 x 368640']",
    "EP on 3 ranks": "['int32 1 x 1'], ['float8_e4m3fn 1 x 25920']",
    "EP x HSDP": "['int32 1 x 1'], ['float8_e4m3fn 2 x 368640', 'uint8 0 x 48']",
}


@pytest.mark.parametrize(("name", "recipe", "once"), CASES)
def test_bits_of_one_device(ranks: RankPools, name: str, recipe: Any, once: bool) -> None:
    placed = MESHES[name]
    for found in ranks(placed.size).run(trained, placed, Float8ExpertsConfig(recipe), once):
        assert (found.wrong, found.reduced) == ([], 0)
        assert f"{found.update}, {found.gathers}" == SENT[name]


@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_without_updates(ranks: RankPools, recipe: Any) -> None:
    """Forwards reduce the amaxes that they need, once per two micro-batches."""
    placed = MESHES["dim 1"]
    for found in ranks(4).run(trained, placed, Float8ExpertsConfig(recipe), False, False):
        assert (found.wrong, found.update) == ([], [])
        assert found.reduced == 2 * 3  # both weights of experts, and the linear layer


@pytest.mark.parametrize("transport", ["bf16", "float8"])
@on_ranks(4, returns=[])
def test_gradients_on_the_wire(transport: Any) -> list[str]:
    """Problems with encoded gradients: unexpected collectives, and wrong gradients of experts.

    The owner of a shard must sum the rounded gradients of ranks in fp32.
    """
    placed = MESHES["EP x FSDP2"]._replace(experts=8)
    model, twin = Mixture(Float8ExpertsConfig(), 8), Mixture(Float8ExpertsConfig(), 8)
    mesh = placed.distribute(model)
    set_gradient_transport(model, transport)
    parts, (dp, ep) = batches(placed, 0), mesh.get_coordinate()
    _, grads = on_one_device(twin, placed, parts)
    with comm_audit(mesh) as audit:
        run(model, parts[dist.get_rank()])
    rows = [row for row in audit.without_modules().rows if row.axis == "dp"]
    wrong = [f"{row.op} {row.dtype}" for row in rows if row.op in ("reduce_scatter", "all_reduce")]
    for name, parameter in model.experts.named_parameters():
        first, second = (each[name].chunk(2)[ep].chunk(2)[dp] for each in grads)
        found = parameter.grad.to_local()
        is_right = (
            same_bits(found, first.bfloat16().float() + second.bfloat16().float())
            if transport == "bf16"
            else 28 < sqnr(first + second, found) < 45
        )
        wrong += [] if is_right else [name]
    return wrong
