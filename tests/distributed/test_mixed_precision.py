"""FSDP2's MixedPrecisionPolicy: sources of casts, dtypes of collectives, SQNR of results."""

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from nets import Distributed, Net, full
from ranks import RankPools
from reference import kinds, same_cast, sqnr, weights_used
from torch.distributed.fsdp import MixedPrecisionPolicy

from fp8_dist import Float8LinearConfig, convert_to_float8_training, update_float8_scales
from fp8_dist.debug import comm_audit
from fp8_dist.linear import float8_layers

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GATHERED_IN_FLOAT8 = ["tensorwise", "rowwise_folded", "delayed"]
DTYPES = [(BF16, FP32), (BF16, BF16), (FP16, FP32)]  # of parameters, and of the reduction


def a_step(
    recipe: str, param_dtype: torch.dtype, reduce_dtype: torch.dtype, cast_inputs: bool
) -> tuple[str, list[str], dict[str, float]]:
    """The second step of a Net on two ranks with the same batch, and of its twin on one device.

    The twin computes with parameters of ``param_dtype``, but for weights that are gathered in
    float8: these are cast from their fp32 masters.

    Returns:
        Collectives; weights that are not the masters' casts, and dtypes that are not as asked;
        SQNR of the output and of all gradients.
    """
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=cast_inputs)
    config = Float8LinearConfig.from_recipe_name(recipe)
    arguments = {"config": config, "net_arguments": {"layers": 1}}
    world = Distributed(2, 1, **arguments, fsdp_arguments={"mp_policy": policy})
    twin = convert_to_float8_training(Net(layers=1), config=config)
    for name, parameter in twin.named_parameters():
        if recipe not in GATHERED_IN_FLOAT8 or name.endswith("bias"):
            parameter.data = parameter.data.to(param_dtype)
    whole, wrong, distances, table = torch.randn(2, 8, 64), [], {}, ""
    for _ in range(2):
        for net in (world.net, twin):
            net.zero_grad()
        batch = whole.repeat(2, 1, 1).to(FP32 if cast_inputs else param_dtype)
        with comm_audit(world.mesh) as audit, weights_used(world.net) as used:
            output = world.net(world.mine(batch))
            output.float().square().mean().backward()
        with weights_used(twin) as expected_weights:
            expected = twin(whole.to(param_dtype))
        expected.float().square().mean().backward()
        table = audit.table()
        wrong = [n for n in used if not same_cast(used[n], expected_weights[n])]
        wrong += [str(output.dtype)] if output.dtype is not param_dtype else []
        distances = {"output": sqnr(expected, output)}
        for (name, parameter), other in zip(
            world.net.named_parameters(), twin.parameters(), strict=True
        ):
            wrong += [name] if parameter.grad.dtype is not FP32 else []
            # Under FSDP2, autograd computes the gradient of a param_dtype parameter.
            distances[name] = sqnr(other.grad.to(param_dtype), full(parameter.grad))
        for net in (world.net, twin):
            update_float8_scales(net)
    for layer in float8_layers(world.net).values():
        wrong += [layer.fqn] if layer.float8_weight.shard().dtype is not FP32 else []
    return table, wrong, distances


def steps(recipe: str) -> list[Any]:
    return [a_step(recipe, *dtypes, i != 1) for i, dtypes in enumerate(DTYPES)]


@pytest.mark.parametrize("recipe", [*GATHERED_IN_FLOAT8, "rowwise"])
def test_a_step(ranks: RankPools, recipe: str) -> None:
    for found in ranks(2).run(steps, recipe):
        for (_, reduce_dtype), (table, wrong, distances) in zip(DTYPES, found, strict=True):
            assert wrong == []
            # The mean of two equal halves is exact: the reduction only rounds to the twin's dtype.
            assert min(distances.values()) > 60, distances
            reduced = [line.split()[2] for line in table.splitlines() if "reduce_scatter" in line]
            assert reduced == [str(reduce_dtype).removeprefix("torch.")]
        if recipe == "tensorwise":
            assert_expected_inline(
                kinds(found[0][0]),
                """\
op              axis  dtype          count  elements    bytes
all_gather      dp    float8_e4m3fn      2    36,864   36,864
all_gather      dp    bfloat16           +       320      640
reduce_scatter  dp    float32            1    18,592   74,368""",
            )
