"""Experts of a user's class, divided between ranks; their named weights, gathered in float8."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from experts import Experts as NamedWeights
from experts import experts_config
from moe_layers import RECIPES
from nets import full
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, reloaded, same_bits, sqnr
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from fp8_dist import attach_update, precompute_float8_dynamic_scale
from fp8_dist.debug import comm_audit
from fp8_dist.moe import (
    Float8ExpertsConfig,
    convert_experts_to_float8_training,
    dispatch_linear,
    linear_combine,
    route,
)
from fp8_dist.tensor_parallel import Float8ExpertParallel, Float8ExpertTensorParallel
from fp8_dist.weight.weights import float8_weights

EXPERTS, DIM, INNER = 8, 64, 96


class Experts(nn.Module):
    float8_weight_names = ("up", "down")
    float8_experts_config: Float8ExpertsConfig | None = None

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up, self.down = (
            nn.Parameter(torch.randn(EXPERTS, n, k, generator=generator))
            for n, k in ((INNER, DIM), (DIM, INNER))
        )

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        group = self.up.device_mesh.get_group() if isinstance(self.up, DTensor) else None
        routing, config = route(ids, EXPERTS, group), self.float8_experts_config
        return linear_combine(
            dispatch_linear(x, self.up, routing, config).relu(), self.down, routing, config
        )


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(24, EXPERTS, generator=generator).topk(2)[1]
    return torch.randn(24, DIM, generator=generator), ids


def converted(recipe: Any) -> Experts:
    model = Experts()
    convert_experts_to_float8_training(model, config=Float8ExpertsConfig(recipe))
    return model


@pytest.mark.parametrize(("recipe", "dim"), zip(RECIPES, (1, 0, 1, 0), strict=True))
@on_ranks(4, returns=[])
def test_bits_of_one_device(recipe: Any, dim: int) -> list[str]:
    """Differences from unconverted experts, which cast their weights in each call."""
    mesh, rank, wrong = device_mesh(dp=2, ep=2), dist.get_rank(), []
    model, twin = converted(recipe), Experts()
    twin.float8_experts_config = Float8ExpertsConfig(recipe)
    parallelize_module(model, mesh["ep"], Float8ExpertParallel())
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(dim))
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(1.0)
    for _ in range(2):
        with comm_audit(mesh) as audit:
            precompute_float8_dynamic_scale(model)
        if audit.count() != dim:
            wrong.append(f"precompute sent {audit.count()} messages")
        with comm_audit(mesh) as audit:
            found = model(*batch(rank))
            found.square().sum().backward()
        dtypes = {row.dtype for row in audit.rows if row.op == "all_gather"}
        if not torch.float8_e4m3fn in dtypes <= {torch.float8_e4m3fn, torch.float32, torch.uint8}:
            wrong.append(f"gathers of {dtypes}")
        if audit.count("all_reduce"):
            wrong.append("amaxes in a step")
        for each in range(4):
            expected = twin(*batch(each))
            expected.square().sum().backward()
            if each == rank and not same_bits(found, expected):
                wrong.append("output")
        for name, parameter in model.named_parameters():
            own = twin.get_parameter(name)
            if sqnr(own.grad, parameter.grad.full_tensor()) < 100:  # other orders of sums
                wrong.append(name)
            with torch.no_grad():
                parameter -= 0.01 * parameter.grad
                own.copy_(parameter.full_tensor())
            parameter.grad = own.grad = None
    return wrong


def refused() -> list[str]:
    model = converted("mxfp8")
    fully_shard(model, mesh=device_mesh(dp=2)["dp"])
    model.float8_experts_config = Float8ExpertsConfig()
    texts = [re.sub(r"\(.*?\)\)?", "", raised(ValueError, lambda: model(*batch(0))))]
    divided, style = (converted("mxfp8"), device_mesh(tp=2)), Float8ExpertTensorParallel()
    texts.append(raised(ValueError, lambda: parallelize_module(*divided, style)))
    model = Experts()
    model.float8_weight_names = ("up", "middle")  # type: ignore[assignment]
    return [*texts, raised(NotImplementedError, lambda: convert_experts_to_float8_training(model))]


def test_what_is_refused(ranks: RankPools) -> None:
    assert_expected_inline(
        "\n".join(ranks(2).run_same(refused)),
        """\
experts: FSDP2 gathered a weight as Blocks, and the config has Dense; pass the module's float8_experts_config
parallelize_module: the module: the features of an Experts can't be divided; use Float8ExpertParallel
convert_experts_to_float8_training: the module can't be converted: it has no parameter middle of shape [E, N, K]. Exclude it in module_filter_fn""",
    )


# Weights [E, N, K] of a module that the library does not know, with one scale per expert.


# Equal and unequal numbers of experts per rank (a fourth rank has none); parts of each expert.
@pytest.mark.parametrize(
    ("dp", "experts", "dim", "reductions"),
    [(3, 6, 0, 0), (4, 6, 0, 1), (2, 4, 1, 1)],
)
@on_ranks("dp")
def test_weights_that_fsdp2_shards(dp: int, experts: int, dim: int, reductions: int) -> None:
    """Differences from one device in two steps, precompute's collectives, and dtypes of gathers.

    The second step follows an update by the optimizer's hook.
    """
    mesh = device_mesh(dp=dp)
    config = experts_config(enable_fsdp_float8_all_gather=True)
    model = nn.Sequential(NamedWeights(experts, 24, 36, config))
    twin = nn.Sequential(NamedWeights(experts, 24, 36, experts_config()))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(dim))
    attached = torch.optim.SGD(model.parameters(), lr=0.1)
    attach_update(attached, model)
    alone = torch.optim.SGD(twin.parameters(), lr=0.1)
    x, wrong = torch.randn(5, 24, generator=torch.Generator().manual_seed(1)), []
    with comm_audit(mesh) as update:
        precompute_float8_dynamic_scale(model)
    gathered: set[torch.dtype] = set()
    for step in range(2):
        with comm_audit(mesh) as audit:
            model(x).square().sum().backward()
        twin(x).square().sum().backward()
        gathered |= {row.dtype for row in audit.rows if row.op == "all_gather"}
        if audit.count("all_reduce"):
            wrong.append(f"step {step}: {audit.table()}")
        pairs = zip(model[0].used, twin[0].used, strict=True)
        if not all(same_bits(a, b) for a, b in pairs):
            wrong.append(f"step {step}: casts")
        for optimizer in (attached, alone):
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in twin.named_parameters():
            mine = full(model.get_parameter(name).detach())
            if sqnr(parameter.detach(), mine) < 100:
                wrong.append(f"step {step}: {name}")
            parameter.data.copy_(mine)  # the mean over ranks rounds
    assert wrong == []
    assert update.count() == reductions
    # If all ranks have equally many whole experts, FSDP2's gather carries their scales.
    assert gathered == {torch.float8_e4m3fn} | (set() if reductions else {torch.float32})


def test_weights_are_saved_plain_and_copied() -> None:
    model = nn.Sequential(
        NamedWeights(2, 24, 36, experts_config(enable_fsdp_float8_all_gather=True))
    )
    saved = reloaded(model.state_dict())
    assert [type(tensor) for tensor in saved.values()] == [torch.Tensor] * 2
    assert model.state_dict(keep_vars=True)["0.up"] is model[0].up
    for copied in (copy.deepcopy(model), reloaded(model, weights_only=False)):
        assert [w.module for w in float8_weights(copied).values()] == [copied[0]] * 2


@on_ranks(2, returns=True)
def test_weights_are_assigned_after_a_step() -> bool:
    config = experts_config(enable_fsdp_float8_all_gather=True)
    model = fully_shard(nn.Sequential(NamedWeights(4, 24, 36, config)), mesh=device_mesh(dp=2))
    model(torch.randn(5, 24)).sum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with comm_audit() as audit:
        model(torch.randn(5, 24))
    return torch.float8_e4m3fn in {row.dtype for row in audit.rows if row.op == "all_gather"}
