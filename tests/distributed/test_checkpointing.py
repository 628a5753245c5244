"""Activation checkpointing: what is computed and communicated a second time."""

from collections import Counter
from typing import Any

import pytest
import torch
from checkpointed import Checkpointed, forward
from graphs import OPS, Ops
from nets import Distributed, Net, full
from rank_tests import on_ranks
from ranks import device_mesh
from reference import same_bits
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module
from torch.utils.checkpoint import checkpoint

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    invalidate_float8_scales,
    precompute_float8_dynamic_scale,
)
from fp8_dist.debug import comm_audit
from fp8_dist.linear import float8_layers
from fp8_dist.operand.state import measured
from fp8_dist.scaling import CastPlan
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from fp8_dist.weight.float8_weight import Float8Weight


def step(net: Net, x: torch.Tensor, mode: str) -> torch.Tensor:
    output = forward(net, x, mode)
    output.square().sum().backward()
    return output.detach()


def results(
    dp: int, tp: int, recipe: str, mode: str, precompute: bool
) -> tuple[Counter[str], str, list[torch.Tensor]]:
    """Op counts, the table of collectives, and output and gradients of a step."""
    world = Distributed(dp, tp, config=Float8LinearConfig.from_recipe_name(recipe))
    if precompute:
        precompute_float8_dynamic_scale(world.net)
    generator = torch.Generator().manual_seed(1)
    x = world.mine(torch.randn(4, 8, 64, generator=generator)).requires_grad_()
    with comm_audit(world.mesh) as audit:
        output = step(world.net, x, mode)
    gradients = [full(p.grad) for p in world.net.parameters()]
    # Counted apart: two modes at once see each other's rewrites.
    with Ops() as ops:
        step(world.net, x, mode)
    return ops.counts, audit.table(), [output, x.grad.clone(), *gradients]


MESHES = [(1, 2, recipe) for recipe in ("tensorwise", "rowwise", "blockwise")]
MESHES += [(2, 1, "rowwise_folded")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("dp", "tp", "recipe"), MESHES)
@on_ranks("dp", "tp")
def test_same_bits_and_nothing_twice(dp: int, tp: int, recipe: str) -> None:
    modes = ("none", "full", "selective")
    for precompute in (False, True):  # the forward computes scales of weights, or knows them
        none, full_mode, selective = (results(dp, tp, recipe, mode, precompute) for mode in modes)
        for other in (full_mode, selective):
            assert all(map(same_bits, none[2], other[2]))
    for op in OPS:
        if op not in ("quantize", "scale_query"):
            # (The selective run does not see operators on a weight that was not precomputed.)
            assert selective[0][op] <= none[0][op], op
    assert selective[1] == none[1]
    if (dp, tp, recipe) == (1, 2, "tensorwise"):
        # Per layer the casts of two inputs and of three weights, and the gather of one input.
        again = {"amax": 4, "quantize": 10, "scaled_mm": 6, "all_gather": 2, "all_reduce": 4}
        assert full_mode[0] - none[0] == again
        assert "all_gather      tp    float8_e4m3fn      4     8,192" in full_mode[1]


def reductions_of_steps(
    recipe: str, mode: str, bias: bool, sequence_parallel: bool, prepared: bool
) -> tuple[list[int], dict[str, int]]:
    """Collectives left in flight by each of three TP steps, and the reductions of the last one."""
    mesh, net = device_mesh(tp=2)["tp"], Net()
    for mlp in net.layers:
        mlp.w2.bias = mlp.w2.bias if bias else None
    convert_to_float8_training(net, config=Float8LinearConfig.from_recipe_name(recipe))
    layout = Shard(1) if sequence_parallel else Replicate()
    takes_one_copy = net.layers[0].w1.config.recipe.gather_scheme["input"] is not None
    prepare = PrepareFloat8ModuleInput if takes_one_copy else PrepareModuleInput
    plan = {}
    for i in range(len(net.layers)):
        if prepared:
            plan[f"layers.{i}"] = prepare(
                input_layouts=(layout,), desired_input_layouts=(Replicate(),)
            )
        inputs = {} if prepared else {"input_layouts": layout}
        plan |= {f"layers.{i}.{name}": Float8ColwiseParallel(**inputs) for name in ("w1", "w3")}
        plan[f"layers.{i}.w2"] = Float8RowwiseParallel(output_layouts=layout)
    parallelize_module(net, mesh, plan)
    x = torch.randn(4, 8 // (2 if sequence_parallel else 1), 64, requires_grad=True)
    in_flight, before = [], torch._C._distributed_c10d._get_work_registry_size()
    for _ in range(3):
        with comm_audit(mesh) as audit:
            step(net, x, mode)
        in_flight.append(torch._C._distributed_c10d._get_work_registry_size() - before)
    high = [row for row in audit.rows if row.dtype is torch.float32]
    reductions = ("reduce_scatter", "all_reduce")
    return in_flight, {op: sum(r.count for r in high if r.op == op) for op in reductions}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("bias", "sequence_parallel", "prepared", "recipe"),
    [  # Every pair of the options.
        (False, True, True, "rowwise_folded"),
        (True, True, False, "rowwise"),
        (True, False, True, "delayed"),
        (False, False, False, "tensorwise"),
    ],
)
@on_ranks(2)
def test_full_checkpointing_leaves_and_repeats_no_reduction(
    bias: bool, sequence_parallel: bool, prepared: bool, recipe: str
) -> None:
    options = (bias, sequence_parallel, prepared)
    kept, checkpointed = (reductions_of_steps(recipe, mode, *options) for mode in ("none", "full"))
    assert checkpointed == kept
    assert kept[0] == [0, 0, 0]


def change_weights(model: nn.Module, optimizer: torch.optim.Optimizer, change: str) -> None:
    """Change weights between forward and backward, in a way that must be noticed."""
    if change == "step":
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    elif change == "to_local":
        with torch.no_grad():
            for weight in model.parameters():
                weight.to_local().mul_(2)  # type: ignore[attr-defined]
    elif change == "invalidate":
        for weight in model.parameters():
            weight.data.mul_(2)
        invalidate_float8_scales(model)


@pytest.mark.parametrize("change", ["nothing", "step", "to_local", "invalidate", "gathered"])
@on_ranks(4, returns=[])
def test_scales_in_the_backward_are_those_of_the_weight(change: str) -> list[str]:
    """Layers whose scales are not those of the values that FSDP2 gathered for them."""
    config = Float8LinearConfig.from_recipe_name("rowwise")
    world = Distributed(2, 2, shard=False, config=config, net_arguments={"layers": 1})
    model = nn.Sequential(Checkpointed(world.net.layers[0], "full"))
    world.fully_shard(model, model)
    optimizer = torch.optim.SGD(model.parameters(), foreach=True)
    if change == "gathered":

        def write(module: nn.Module, _: object) -> None:
            with torch.no_grad():
                for layer in float8_layers(module).values():
                    layer.weight.mul_(3)

        model[0].register_forward_pre_hook(write)
    stale: list[str] = []
    original = Float8Weight.operands

    def checking(self: Any, parameter: torch.Tensor, both: bool) -> Any:
        found = original(self, parameter, both)
        again = found.grad_input.scheme.scales_from(found.grad_input.statistics)
        kept = [found.output.scales[0], again[0]]
        casts = [self.config.recipe.uses["weight"][gemm] for gemm in ("output", "grad_input")]
        for cast, scale in zip(casts, kept, strict=True):
            plan = CastPlan((cast,)).on(self.layout(parameter))
            (known,) = measured(self.shard().detach(), plan)
            if not same_bits(scale, cast.scales_from(known)[0]):
                stale.append(self.fqn)
        return found

    Float8Weight.operands = checking  # type: ignore[method-assign]
    try:
        for _ in range(2):
            loss = model(world.mine(torch.randn(4, 8, 64)).requires_grad_()).square().sum()
            change_weights(model, optimizer, change)
            loss.backward()
            for weight in model.parameters():
                weight.data.mul_(1.5)  # unseen: what a forward knows mustn't reach the next one
    finally:
        Float8Weight.operands = original  # type: ignore[method-assign]
    return stale


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1)])
@on_ranks("dp", "tp")
def test_reentrant_checkpointing_repeats_no_amax_of_a_weight(dp: int, tp: int) -> None:
    """Its first forward runs without gradients, as an evaluation does. Nothing is precomputed."""
    found = []
    for reentrant in (True, False):
        world = Distributed(dp, tp)
        output = world.mine(torch.randn(4, 8, 64)).requires_grad_()
        with Ops() as ops:
            for layer in world.net.layers:
                output = output + checkpoint(layer, output, use_reentrant=reentrant)
            output.sum().backward()
        found.append({op: ops.counts[op] for op in ("amax", "all_reduce")})
    assert found[0] == found[1]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on_ranks(2)
def test_selective_checkpointing_finds_the_scales_of_precompute(recipe: str) -> None:
    """FSDP2 gathers in high precision, so operators look the sharded parameter's scales up."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    world, counts = Distributed(1, 2, config=config, gather=False), []
    x = world.mine(torch.randn(4, 8, 64)).requires_grad_()
    for mode in ("none", "selective"):
        precompute_float8_dynamic_scale(world.net)
        with comm_audit(world.mesh) as audit:
            forward(world.net, x, mode)
        counts.append(audit.count("all_reduce"))
    assert counts[0] == counts[1]
