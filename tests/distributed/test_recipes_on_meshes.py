"""Every recipe under FSDP2, TP + SP and their product: results, and what is communicated."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from nets import Distributed, full
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import all_warnings, kinds, raised, same_bits, sqnr
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from fp8_dist import (
    CastConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingType,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
)
from fp8_dist.debug import comm_audit
from fp8_dist.linear import float8_layers
from fp8_dist.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, apply_tp_plan

RECIPES = [recipe.value for recipe in Float8LinearRecipeName]
OFF = CastConfig(scaling_type=ScalingType.DISABLED)
HIGH_PRECISION = Float8LinearConfig(
    cast_config_input=OFF, cast_config_weight=OFF, cast_config_grad_output=OFF
)


@on_ranks(4, returns={})
def test_outputs_and_gradients() -> dict[str, float]:
    """SQNR in dB of output, input gradient and all parameter gradients, in the second step."""
    result: dict[str, float] = {}
    dp = tp = 2
    configs = {recipe: Float8LinearConfig.from_recipe_name(recipe) for recipe in RECIPES}
    for recipe, config in (configs | {"off": HIGH_PRECISION}).items():
        world = Distributed(dp, tp, config=config, gather=recipe != "off")
        for _ in range(2):
            # The same rows on every dp rank: activations of dp ranks have scales of their own.
            x, grad = (torch.randn(2, 8, 64).repeat(dp, 1, 1) for _ in range(2))
            mine = world.mine(x).requires_grad_()
            output = world.net(mine)
            output.backward(world.mine(grad))
            whole = x[:2].clone().requires_grad_()
            expected = world.twin(whole)
            expected.backward(grad[:2])
            result |= {
                f"{recipe}: output": sqnr(world.mine(expected.repeat(dp, 1, 1)), output),
                f"{recipe}: grad_input": sqnr(world.mine(whole.grad.repeat(dp, 1, 1)), mine.grad),
            }
            pairs = zip(world.net.named_parameters(), world.twin.parameters(), strict=True)
            for (name, actual), parameter in pairs:
                result[f"{recipe}: {name}"] = sqnr(parameter.grad, full(actual.grad))
                actual.grad = parameter.grad = None
            if config.recipe.delayed:
                sync_float8_amax_and_scale_history(world.net)
                sync_float8_amax_and_scale_history(world.twin)
    return {name: value for name, value in result.items() if value <= 120}


def table_of_a_folded_step() -> str:
    """Collectives of the second step, with its precompute, of a Net in bf16."""
    config = Float8LinearConfig.from_recipe_name("rowwise_folded")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    world = Distributed(2, 2, config=config, fsdp_arguments={"mp_policy": policy})
    optimizer = torch.optim.SGD(world.net.parameters(), lr=0.1)
    table = ""
    for _ in range(2):
        with comm_audit(world.mesh) as audit:
            world.net(world.mine(torch.randn(4, 8, 64).bfloat16())).sum().backward()
            optimizer.step()
            precompute_float8_dynamic_scale(world.net)
        table = audit.table()
    return table


def test_rowwise_folded_gathers_float8_rows_with_their_scales(ranks: RankPools) -> None:
    assert_expected_inline(
        kinds(ranks(4).run_same(table_of_a_folded_step)),
        """\
op              axis  dtype          count  elements   bytes
all_gather      dp    float8_e4m3fn      4    36,864  36,864
all_gather      dp    float32            +       640   2,560
all_gather      dp    bfloat16           +       448     896
all_gather      tp    float8_e4m3fn      4     4,096   4,096
all_gather      tp    float32            +        96     384
all_reduce      tp    int32              7       256   1,024
reduce_scatter  tp    bfloat16           3     3,072   6,144
all_reduce      tp    bfloat16           2       128     256
reduce_scatter  dp    bfloat16           2    18,656  37,312""",
    )


@on_ranks(2, returns=[1, 0])
def test_precompute_finds_all_scales_of_uneven_rows() -> list[int]:
    """All-reduces of precompute and of a step after it, where FSDP2 divides rows unevenly."""
    config = Float8LinearConfig.from_recipe_name("rowwise_folded")
    world = Distributed(2, 1, config=config, net_arguments={"hidden": 33})
    counts = []
    for run in (
        lambda: precompute_float8_dynamic_scale(world.net),
        lambda: world.net(world.mine(torch.randn(4, 8, 64))).sum().backward(),
    ):
        with comm_audit(world.mesh) as audit:
            run()
        counts.append(audit.count("all_reduce"))
    return counts


def shared_by_two_configs(*configs: Float8LinearConfig) -> str:
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for i, config in enumerate(configs):
        config = replace(config, enable_fsdp_float8_all_gather=True)
        net[i] = convert_to_float8_training(net[i], config=config)
    net[1].weight = net[0].weight
    fully_shard(net, mesh=device_mesh(dp=2))
    return raised(ValueError, lambda: net(torch.randn(4, 32)))


def test_layers_that_share_a_gathered_weight_round_its_scale_alike(ranks: RankPools) -> None:
    """And have one granularity."""
    folded = Float8LinearConfig.from_recipe_name("rowwise_folded")
    text = ranks(2).run_same(shared_by_two_configs, folded, Float8LinearConfig())
    assert "FSDP2 gathered the weight as torch.float8_e4m3fn with one scale per row" in text
    rounded = Float8LinearConfig(round_scales_to_power_of_2=True)
    text = ranks(2).run_same(shared_by_two_configs, Float8LinearConfig(), rounded)
    (gathered, taken) = text.split("for another layer that shares it, but this layer takes")
    assert ("power_of_2=False" in gathered, "power_of_2=True" in taken) == (True, True)


@pytest.mark.parametrize("operand", ["input", "grad_output"])
@on_ranks(2)
def test_rows_that_can_not_travel_in_float8_are_named(operand: str) -> None:
    config = Float8LinearConfig.from_recipe_name("rowwise_folded")
    net = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config=config)
    styles = {
        "input": Float8ColwiseParallel(input_layouts=Shard(-1)),
        "grad_output": Float8RowwiseParallel(output_layouts=Shard(-1)),
    }
    apply_tp_plan(net, device_mesh(tp=2), {"0": styles[operand]})
    with all_warnings() as texts:
        net(torch.randn(4, 16)).sum().backward()
    (text,) = [text for text in texts if "high precision" in text]
    assert text.startswith(f"0: {operand} is gathered in high precision, because")


@on_ranks(4, returns=[])
def test_column_parallel_outputs() -> list[str]:
    world = Distributed(1, 4)
    for model in (world.net, world.twin):
        model.to(torch.bfloat16)
    outputs: dict[str, dict[str, torch.Tensor]] = {"net": {}, "twin": {}}
    for kind, model in (("net", world.net), ("twin", world.twin)):
        for name, layer in float8_layers(model).items():
            layer.register_forward_hook(
                lambda m, i, o, kind=kind, name=name: outputs[kind].setdefault(name, o)
            )
    x = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    world.net.layers[0](world.mine(x))
    world.twin.layers[0](x)
    rank = world.mesh.get_local_rank("tp")
    return [
        name
        for name in ("layers.0.w1", "layers.0.w3")
        if not same_bits(
            outputs["net"][name], outputs["twin"][name].chunk(4, dim=-1)[rank].contiguous()
        )
    ]


BAD = {"input": (math.nan, math.inf), "weight": (math.nan, math.inf, -math.inf)}


@on_ranks(4)
def test_a_non_finite_value_on_one_rank_is_visible_on_all_that_share_it() -> None:
    """Every value of the model's output turns into NaN there."""
    for where, bad in ((where, bad) for where, values in BAD.items() for bad in values):
        world = Distributed(2, 2)
        x, weight = world.mine(torch.randn(2, 8, 64)), world.net.layers[0].w1.weight
        if torch.distributed.get_rank() == 1:
            target = x if where == "input" else weight._local_tensor.plain
            target.detach().view(-1)[3] = bad
        if where == "weight":
            precompute_float8_dynamic_scale(world.net)
        # Ranks 0 and 1 share the activations; 2 and 3 have others.
        shared = where == "weight" or torch.distributed.get_rank() < 2
        assert world.net(x).isnan().all() == shared
