"""Experts that tensor parallelism divides, so that each rank has a part of every expert.

The operands of GEMMs, and so the gradients of weights, have the bits of one device. Sums over ranks
have another order.
"""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from hf_experts import Mixture, made, step
from moe_layers import RECIPES
from nets import full
from ranks import RankPools, device_mesh
from reference import kinds, raised, same_bits, sqnr
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch_releases import pieces_that_torch_moves
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from fp8_dist import attach_update, precompute_float8_dynamic_scale
from fp8_dist.debug import comm_audit
from fp8_dist.debug.audit import CommTable
from fp8_dist.integrations.transformers import hf_tp_plan
from fp8_dist.moe import Float8ExpertsConfig, float8_experts
from fp8_dist.tensor_parallel import Float8ExpertTensorParallel, apply_tp_plan

Results = dict[str, Tensor]


def batch(seed: int) -> Results:
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(19, 160, generator=generator) for _ in range(2))
    ids = torch.rand(19, 6, generator=generator).argsort(1)[:, :2]
    return {"x": x, "ids": ids, "weights": torch.rand(19, 2, generator=generator), "grad": grad}


def run(experts: Any, batch: Results) -> Results:
    """Run a pass; return the output and the gradients of tokens and routing weights."""
    x, weights = (batch[name].clone().requires_grad_() for name in ("x", "weights"))
    output = experts(x, batch["ids"], weights)
    output.backward(batch["grad"])
    assert x.grad is not None
    assert weights.grad is not None
    return {"output": output.detach(), "x": x.grad, "weights": weights.grad}


class Steps(NamedTuple):
    """Differences from one device in two steps; and the collectives of an update and of a step."""

    wrong: list[str]
    update: str
    step: str


def trained(recipe: Any, dp: int = 1) -> Steps:
    """Train on ``dp`` x 2 ranks, and compare with one device."""
    mesh, wrong = device_mesh(dp=dp, tp=2), []
    model, twin = (Mixture(Float8ExpertsConfig(recipe), 6, 256) for _ in range(2))
    parallelize_module(model.experts, mesh["tp"], Float8ExpertTensorParallel())
    if dp > 1:
        fully_shard(model.experts, mesh=mesh["dp"])
        model.experts.set_gradient_divide_factor(1.0)
        model.experts.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.experts.parameters(), lr=1e-3)
    attach_update(optimizer, model)
    with comm_audit(mesh) as update:
        precompute_float8_dynamic_scale(model)
    for i in range(2):
        own = mesh.get_coordinate()[0]
        with comm_audit(mesh) as audit:
            found = run(model.experts, batch(10 * i + own))
        expected = [run(twin.experts, batch(10 * i + j)) for j in range(dp)][own]
        wrong += [f"{i}: {name}" for name in found if sqnr(expected[name], found[name]) < 110]
        for name, parameter in model.experts.named_parameters():
            weight = twin.experts.get_parameter(name)
            if not same_bits(full(parameter.grad), weight.grad):
                wrong.append(f"{i}: {name}")
            weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            twin.get_parameter(name).data.copy_(full(parameter.detach()))
    rows = audit.without_modules().rows
    return Steps(wrong, kinds(update.table()), kinds(CommTable(rows).table()))


def test_tensor_parallelism(ranks: RankPools) -> None:
    """Amaxes of 38 rows are reduced: of hidden features and their gradients (folded ones twice)."""
    with pieces_that_torch_moves():  # to compare full tensors
        found = {recipe: ranks(2).run_same(trained, recipe) for recipe in RECIPES}
        assert {recipe: steps.wrong for recipe, steps in found.items()} == {r: [] for r in RECIPES}
        assert_expected_inline(
            "\n".join(f"{recipe}\n{steps.update}\n{steps.step}" for recipe, steps in found.items()),
            """\
rowwise_folded
op          axis  dtype  count  elements  bytes
all_reduce  tp    int32      1       960  3,840
op          axis  dtype    count  elements   bytes
all_reduce  tp    int32        3       114     456
all_reduce  tp    float32      3     6,118  24,472
tensorwise
op          axis  dtype  count  elements  bytes
all_reduce  tp    int32      1        12     48
op          axis  dtype    count  elements   bytes
all_reduce  tp    int32        2        76     304
all_reduce  tp    float32      3     6,118  24,472
blockwise

op          axis  dtype    count  elements   bytes
all_reduce  tp    float32      3     6,118  24,472
mxfp8

op          axis  dtype    count  elements   bytes
all_reduce  tp    float32      3     6,118  24,472""",
        )


def test_with_fsdp2(ranks: RankPools) -> None:
    with pieces_that_torch_moves():
        found = ranks(4).run(trained, "rowwise_folded", 2)
        assert [steps.wrong for steps in found] == [[]] * 4


def planned() -> list[float]:
    """The SQNR of the logits, and of the worst gradient, compared with one device."""
    model, twin = made("qwen3_moe"), made("qwen3_moe")
    with pytest.warns(UserWarning, match="hf_tp_plan leaves routed experts as they are"):
        plan = hf_tp_plan(model)
    plan |= {fqn: Float8ExpertTensorParallel() for fqn in float8_experts(model)}
    apply_tp_plan(model, device_mesh(tp=2), plan)
    for experts in float8_experts(model).values():
        assert experts.get_parameter("down_proj").placements == (Shard(2),)
    logits, grads = step(model)
    expected, twin_grads = step(twin)
    return [sqnr(expected, logits), min(sqnr(twin_grads[n], full(grads[n])) for n in twin_grads)]


def test_in_a_plan_of_transformers(ranks: RankPools) -> None:
    with pieces_that_torch_moves():
        for found in ranks(2).run(planned):
            assert min(found) > 100


def refused_in_transformers_plan(mesh: DeviceMesh) -> str:
    model = Mixture(Float8ExpertsConfig())
    styles = {".gate_up_proj": "packed_colwise", ".down_proj": "rowwise", "": "moe_tp_experts"}
    plan = {f"experts{name}": style for name, style in styles.items()}
    apply_tensor_parallelism(model, mesh, plan)
    return raised(NotImplementedError, lambda: run(model.experts, batch(0)))


def refused() -> list[str]:
    """The errors of invalid setups on each rank, after each of which a collective must work."""
    mesh, texts = device_mesh(dp=1, tp=2)["tp"], []
    style, folded = Float8ExpertTensorParallel(), Float8ExpertsConfig()
    combined = Mixture(Float8ExpertsConfig(combine="float8")).experts
    odd, plain, blocks = (
        Mixture(folded, 6, 97),
        nn.Linear(8, 8),
        Mixture(Float8ExpertsConfig("mxfp8")),
    )
    transposed = made("gpt_oss").model.layers[0].mlp.experts
    for module in (combined, odd.experts, plain, transposed):
        texts.append(raised(ValueError, lambda: parallelize_module(module, mesh, style)))  # noqa: B023
        dist.barrier()
    parallelize_module(blocks.experts, mesh, style)
    texts.append(raised(NotImplementedError, lambda: run(blocks.experts, batch(0))))
    halves = Mixture(folded)  # plain Shard(1): gate on one rank, up on the other
    for name, dim in (("gate_up_proj", 1), ("down_proj", 2)):
        whole = halves.experts.get_parameter(name).detach()
        setattr(halves.experts, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)])))
    texts.append(raised(ValueError, lambda: run(halves.experts, batch(0))))
    dist.barrier()
    texts.append(refused_in_transformers_plan(mesh))
    dist.barrier()
    both = Mixture(folded)
    parallelize_module(both.experts, mesh, style)
    shard = partial(fully_shard, both.experts, mesh=device_mesh(dp=1, tp=2)["dp"])
    late = raised(ValueError, lambda: shard(shard_placement_fn=lambda _: Shard(1)))
    return [*texts, late]


def test_setups_that_do_not_fit(ranks: RankPools) -> None:
    assert_expected_inline(
        "\n".join(ranks(2).run_same(refused)),
        """\
parallelize_module: experts: combine='float8' would cast the outputs before they are summed over ranks; use combine='high_precision'
parallelize_module: experts.gate_up_proj: 97 features can't be divided equally between 2 ranks; choose a number of ranks that divides it
parallelize_module: Float8ExpertTensorParallel is for experts, but a Linear has none in float8; call convert_experts_to_float8_training first
parallelize_module: model.layers.0.mlp.experts: the features of a GptOssExperts can't be divided; use Float8ExpertParallel
a tensor of shape (8, 192, 160) placed as [_StridedShard(dim=1, sf=2)] can't be cast with one scale per block of 32 x 32 (MX): ranks have several pieces of it (_StridedShard), and some begin inside of a block; redistribute it to Shard or Replicate first, or choose sizes of which all pieces have whole blocks
experts: gate_up_proj is placed as [Shard(dim=1)] on DeviceMesh((tp=2), 'cpu', stride=(1,)) in the forward; experts are divided by Float8ExpertParallel or Float8ExpertTensorParallel on one axis, and FSDP2 shards them over others
experts: the forward was given (96, 160) of the features (192, 160) of gate_up_proj, as moe_tp_experts passes them; leave converted experts out of its plan, and divide them by Float8ExpertTensorParallel
experts: FSDP2 shards dim 1 of gate_up_proj, of which tensor parallelism has given each rank several pieces, and torch would save them in another order; shard another dim (shard_placement_fn)""",
    )
