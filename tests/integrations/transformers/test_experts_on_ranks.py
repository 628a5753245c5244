"""Experts of transformers models in float8, divided among ranks and sharded by FSDP2.

Logits and gradients of experts have the bits of one device. With data parallelism, gradients are
summed in another order, so they are compared by SQNR.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from documented import run_shown
from expecttest import assert_expected_inline
from hf_experts import IDS, different, made, step
from hf_models import build
from nets import full
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, same_bits, sqnr
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fp8_dist import attach_update, precompute_float8_dynamic_scale
from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import average_gradients_over
from fp8_dist.moe import convert_experts_to_float8_training, float8_experts
from fp8_dist.tensor_parallel import Float8ExpertParallel

PAGE = Path(__file__).parents[3] / "docs/experts.md"
NAMES = ("gate_up_proj", "down_proj")
BF16 = torch.bfloat16


def parallel(model: nn.Module, mesh: Any) -> nn.Module:
    for experts in float8_experts(model).values():
        parallelize_module(experts, mesh, Float8ExpertParallel())
    return model


@pytest.mark.parametrize(
    ("kind", "fields", "checkpointing"),
    [
        ("olmoe", {"recipe": "blockwise", "combine": "float8"}, False),
        ("deepseek_v3", {"recipe": "tensorwise"}, True),
        ("gpt_oss", {"recipe": "rowwise_folded"}, False),
    ],
)
@on_ranks(2, returns=[])
def test_expert_parallelism(kind: str, fields: dict[str, Any], checkpointing: bool) -> list[str]:
    """Differences from one device, on two ranks with two texts each."""
    mesh, rank = device_mesh(ep=2), dist.get_rank()
    model, twin = parallel(made(kind, **fields), mesh["ep"]), made(kind, **fields)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    logits, expected = step(model, IDS[2 * rank : 2 * rank + 2]), step(twin)
    grads = {name: None if g is None else full(g) for name, g in logits[1].items()}
    split = [isinstance(p, DTensor) for name, p in model.named_parameters() if ".experts." in name]
    assert all(split)
    mine = expected[0][2 * rank : 2 * rank + 2]
    return different((logits[0], grads), (mine, expected[1]), only=".mlp.experts.")


def shard(model: Any, mesh: Any, policy: MixedPrecisionPolicy) -> None:
    """Shard experts over dp, and all other parameters over dp and ep."""
    world = mesh["dp", "ep"]._flatten("dp_ep")
    place = {"shard_placement_fn": lambda _: Shard(1), "mp_policy": policy}
    for experts in float8_experts(model).values():
        fully_shard(experts, mesh=mesh["dp"], **place)
        average_gradients_over(experts, mesh)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=world, mp_policy=policy)


@on_ranks(4)
def test_expert_parallelism_and_fsdp2_in_bf16() -> None:
    """Two steps on dp 2 x ep 2, the second after an update by the optimizer's hook.

    Scales of transposed weights cover rows of several shards of Shard(1), so precompute reduces
    them.
    """
    mesh, rank, wrong = device_mesh(dp=2, ep=2), dist.get_rank(), []
    model, twin = parallel(made("gpt_oss", "rowwise_folded"), mesh["ep"]), made("gpt_oss")
    shard(model, mesh, MixedPrecisionPolicy(BF16, cast_forward_inputs=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach_update(optimizer, model)
    for parameter in twin.parameters():  # experts are cast from fp32 weights
        parameter.data = parameter.to(BF16 if parameter.ndim < 3 else parameter.dtype)
    with comm_audit(mesh) as update:
        precompute_float8_dynamic_scale(model)
    gathered, reductions = set(), 0
    for i in range(2):
        with comm_audit(mesh) as audit:
            logits, grads = step(model, IDS[rank : rank + 1])
        expected, twin_grads = step(twin)
        if not same_bits(logits, expected[rank : rank + 1]):
            wrong.append(f"step {i}: logits")
        wrong += [n for n in twin_grads if sqnr(twin_grads[n], 4 * full(grads[n])) < 30]
        rows = [row for row in audit.rows if (row.op, row.axis) == ("all_gather", "dp")]
        gathered |= {row.dtype for row in rows}
        reductions += audit.count("all_reduce")
        optimizer.step()
        optimizer.zero_grad()
        twin.zero_grad()
        for name, parameter in model.named_parameters():
            twin.get_parameter(name).data.copy_(full(parameter.detach()))
    assert wrong == []
    assert gathered == {torch.float8_e4m3fn, BF16}
    assert (update.count(), reductions) == (1, 0)


@on_ranks(2, returns=[])
def test_ddp() -> list[str]:
    model, twin, rank = made("olmoe"), made("olmoe"), dist.get_rank()
    wrapped = DistributedDataParallel(model)
    wrapped(IDS[2 * rank : 2 * rank + 2]).logits.square().sum().backward()
    grads = step(twin, scale=0.5)[1]
    return [n for n, p in model.named_parameters() if sqnr(grads[n], p.grad) < 100]


@on_ranks(4, returns=[True] * 3)
def test_the_page() -> list[bool]:
    """Run the page's programs; return whether the loss falls, and products and outputs agree."""
    torch.manual_seed(0)
    scope: dict[str, Any] = {"torch": torch, "F": F, "mesh": device_mesh(dp=2, ep=2), "group": None}
    first, second, third, fourth = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    run_shown(first + second, scope)
    ids, losses = torch.randint(0, 256, (2, 16)) + dist.get_rank(), []
    for _ in range(4):
        loss = scope["model"](ids % 256, labels=ids % 256).loss
        loss.backward()
        scope["optimizer"].step()
        scope["optimizer"].zero_grad()
        losses.append(loss.item())
    tokens, w1, w2 = torch.randn(6, 32), torch.randn(2, 16, 32), torch.randn(2, 32, 16)
    scope |= {"tokens": tokens, "w1": w1, "w2": w2, "w3": w1, "num_experts": 2, "rows": tokens}
    scope |= {
        "expert_ids": torch.tensor([[0]] * 2 + [[1]] * 4),
        "routing_weights": torch.ones(6, 1),
    }
    scope |= {"weight": w1, "offs": torch.tensor([2, 6])}
    run_shown(third, scope)
    run_shown(fourth, own := scope | {"nn": nn, "DTensor": DTensor})
    experts = own["Experts"]()
    for name in ("w1", "w2", "w3"):
        setattr(experts, name, nn.Parameter(scope[name]))
    convert_experts_to_float8_training(experts)
    output = experts(tokens, scope["expert_ids"], scope["routing_weights"])
    agree = torch.equal(scope["hidden"], scope["gate"]), torch.equal(output, scope["output"])
    return [losses[-1] < losses[0], *agree]


def refused() -> list[str]:
    """The errors of invalid setups on each rank, after each of which a collective must work."""
    mesh, rank = device_mesh(ep=2)["ep"], dist.get_rank()
    configs = [[{}, {"recipe": "mxfp8"}], [{}, {"combine": "float8"}]]
    models = [made("mixtral", **both[rank]) for both in configs]
    three = convert_experts_to_float8_training(build("mixtral", num_local_experts=3))
    one = made("mixtral") if rank else build("mixtral")
    texts = []
    for model in (*models, three, build("mixtral"), one):
        experts = model.model.layers[1].mlp.experts
        style = Float8ExpertParallel()
        texts.append(raised(ValueError, lambda: parallelize_module(experts, mesh, style)))  # noqa: B023
        dist.barrier()
    block = made("mixtral").model.layers[1]
    around = raised(ValueError, lambda: parallelize_module(block, mesh, Float8ExpertParallel()))
    return [*texts, around, *placed_otherwise(mesh)]


def placed_otherwise(mesh: DeviceMesh) -> list[str]:
    """The errors for weights that were not distributed by Float8ExpertParallel."""

    early, both, one = build("mixtral"), made("mixtral"), made("mixtral")
    for model, names, placement in (
        (early, NAMES, Shard(0)),
        (both, NAMES, Replicate()),
        (one, NAMES[:1], Shard(0)),
    ):
        experts = model.model.layers[1].mlp.experts
        for name in names:
            whole = experts.get_parameter(name).detach()
            placed = distribute_tensor(whole, mesh, [placement])
            setattr(experts, name, nn.Parameter(placed))
    texts = [raised(ValueError, lambda: convert_experts_to_float8_training(early))]
    return texts + [raised(ValueError, lambda: model(IDS)) for model in (both, one)]  # noqa: B023


def test_setups_that_do_not_fit(ranks: RankPools) -> None:
    recipe, combine, three, plain, one, around, early, *placed = ranks(2).run_same(refused)
    differ = "parallelize_module: the ranks of DeviceMesh((ep=2), 'cpu', stride=(1,)) have set up "
    assert all(text.startswith(differ) for text in (recipe, combine, one))
    assert "recipe rowwise_folded on rank 0, mxfp8 on rank 1" in recipe
    assert early == (
        "convert_experts_to_float8_training: the weights of model.layers.1.mlp.experts are "
        "distributed already. Convert the model first, then apply tensor parallelism, then "
        "fully_shard. One that is distributed already, as after convert_to_linear, can't be "
        "converted: make a new model in this order, and load the state_dict of this one"
    )
    assert "combine: 'high_precision' on rank 0; 'float8' on rank 1" in combine
    assert "model.layers.1.mlp.experts.gate_up_proj" in one
    assert_expected_inline(
        "\n".join([three, plain, around, *placed]),
        """\
parallelize_module: model.layers.1.mlp.experts.gate_up_proj: 3 experts can't be divided equally between 2 ranks; choose a number of ranks that divides it
parallelize_module: Float8ExpertParallel is for experts, but a MixtralExperts has none in float8; call convert_experts_to_float8_training first
parallelize_module: Float8ExpertParallel is for experts, but a MixtralDecoderLayer is a module around them; apply the style to its mlp.experts
model.layers.1.mlp.experts: gate_up_proj is placed as [Replicate()] on DeviceMesh((ep=2), 'cpu', stride=(1,)) in the forward; experts are divided by Float8ExpertParallel or Float8ExpertTensorParallel on one axis, and FSDP2 shards them over others
model.layers.1.mlp.experts: the weights of the experts are distributed in different ways""",
    )
