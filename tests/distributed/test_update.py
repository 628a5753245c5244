"""update_float8_scales: what it runs for each recipe on each mesh; what layers say of themselves."""

from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from nets import Distributed, Net, full_state, wrong_casts
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import known, raised, same_bits, weights_used
from torch import randn
from torch.distributed.fsdp import fully_shard

import fp8_dist.text
from fp8_dist import (
    CastConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingType,
    attach_update,
    conversion_summary,
    convert_to_float8_training,
    float8_layers,
    sync_float8_amax_and_scale_history,
    update_float8_scales,
)
from fp8_dist.debug import comm_audit
from fp8_dist.mesh import local_tensor
from fp8_dist.tensor_parallel import Float8ColwiseParallel, apply_tp_plan

# FSDP2 alone gathers rows with their scales, and needs nothing.
RECIPES_ON_MESHES = [(2, 1, "tensorwise"), (2, 1, "rowwise_folded"), (2, 1, "mxfp8")]
RECIPES_ON_MESHES += [(2, 2, recipe.value) for recipe in Float8LinearRecipeName]


def collectives(audit: Any) -> str:
    shown = [f"{row.op} of {row.elements} over {row.axis}" for row in audit.rows]
    return ", ".join(shown) or "nothing"


def updated_step(dp: int, tp: int, recipe: str) -> tuple[str, int]:
    """A step after an update, against that of a model which was only synced if it is delayed.

    Returns:
        Collectives of the update, and how many all-reduces it saves in the step.
    """
    fp8_dist.text._warned.clear()
    config = Float8LinearConfig.from_recipe_name(recipe)
    sync = sync_float8_amax_and_scale_history if config.recipe.delayed else lambda module: None
    found, reduces, results = [], [], []
    for update in (update_float8_scales, sync):
        world = Distributed(dp, tp, config=config)
        x = world.mine(torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(1)))
        optimizer = torch.optim.SGD(world.net.parameters(), lr=0.1)
        world.net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with comm_audit(world.mesh) as updating:
            update(world.net)
        with comm_audit(world.mesh) as step:
            output = world.net(x)
            output.square().mean().backward()
        if update is update_float8_scales:
            assert not fp8_dist.text._warned
        found.append(collectives(updating))
        reduces.append(step.count("all_reduce"))
        results.append([output, *(local_tensor(p.grad) for p in world.net.parameters())])
    assert all(map(same_bits, *results))
    return found[0], reduces[1] - reduces[0]


def test_every_recipe_on_meshes(ranks: RankPools) -> None:
    lines = []
    for dp, tp, recipe in RECIPES_ON_MESHES:
        found, saved = ranks(dp * tp).run_same(updated_step, dp, tp, recipe)
        lines.append(f"{recipe:<18} dp {dp} tp {tp}: {found}, {saved} fewer in the step")
    # FSDP2 gathers in high precision: only parts that share scales are updated.
    assert_expected_inline(
        "\n".join(lines),
        """\
tensorwise         dp 2 tp 1: all_reduce of 6 over dp, 6 fewer in the step
rowwise_folded     dp 2 tp 1: nothing, 0 fewer in the step
mxfp8              dp 2 tp 1: all_reduce of 24 over dp, 4 fewer in the step
tensorwise         dp 2 tp 2: all_reduce of 6 over world, 6 fewer in the step
rowwise            dp 2 tp 2: all_reduce of 384 over world, 6 fewer in the step
rowwise_with_gw_hp dp 2 tp 2: all_reduce of 134 over world, 8 fewer in the step
rowwise_folded     dp 2 tp 2: all_reduce of 128 over tp, 2 fewer in the step
blockwise          dp 2 tp 2: all_reduce of 6 over world, 6 fewer in the step
mxfp8              dp 2 tp 2: all_reduce of 36 over world, 6 fewer in the step
delayed            dp 2 tp 2: all_reduce of 20 over world, 0 fewer in the step""",
    )


@on_ranks(4)
def test_layers_of_all_kinds_in_one_model() -> None:
    mesh = device_mesh(dp=2, tp=2)
    off, delayed = (CastConfig(kind) for kind in (ScalingType.DISABLED, ScalingType.DELAYED))
    gathered = Float8LinearConfig(enable_fsdp_float8_all_gather="auto")
    configs = {
        "float8": gathered,
        "high": Float8LinearConfig(),
        "rowwise": Float8LinearConfig.from_recipe_name("rowwise"),
        "ignored": Float8LinearConfig(),
        "whole": Float8LinearConfig(),
        "off": Float8LinearConfig(
            cast_config_input=off, cast_config_weight=off, cast_config_grad_output=off
        ),
        "input": Float8LinearConfig(cast_config_input=delayed),
    }
    net = nn.Sequential(OrderedDict((name, nn.Linear(32, 48)) for name in configs))
    for name, config in configs.items():
        layer = net.get_submodule(name)
        net.set_submodule(name, convert_to_float8_training(layer, config=config))
    apply_tp_plan(net, mesh["tp"], {name: Float8ColwiseParallel() for name in ("ignored", "input")})
    outside = {
        p for name in ("ignored", "whole", "input") for p in net.get_submodule(name).parameters()
    }
    fully_shard(net, mesh=mesh["dp"], ignored_params=outside)
    with comm_audit(mesh) as audit:
        update_float8_scales(net)
    layers = float8_layers(net).items()
    names = [name for name, each in layers if known(each.weight) is not None]
    assert names == ["float8", "ignored", "input"]
    # Precompute: each weight has a slot per coordinate on the axis that its mesh lacks. Sync.
    assert collectives(audit) == "all_reduce of 6 over world, all_reduce of 1 over tp"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
@on_ranks(4)
def test_attach_update(recipe: str) -> None:
    """Collectives of a step with the hook, of an update, and of a step after its removal."""
    world = Distributed(2, 2, config=Float8LinearConfig.from_recipe_name(recipe))
    optimizer = torch.optim.AdamW(world.net.parameters())
    handle = attach_update(optimizer, world.net)
    world.net(world.mine(torch.randn(4, 8, 64))).square().mean().backward()
    found = []
    for call in (optimizer.step, partial(update_float8_scales, world.net), optimizer.step):
        with comm_audit(world.mesh) as audit:
            call()
        found.append(collectives(audit))
        if len(found) == 2:
            handle.remove()
    attached_step, update, plain_step = found
    assert attached_step == update != "nothing"
    assert plain_step == "nothing"


def test_a_model_that_was_not_converted() -> None:
    attach = partial(attach_update, torch.optim.SGD(Net().parameters()))
    for name, call in (("update_float8_scales", update_float8_scales), ("attach_update", attach)):
        text = raised(ValueError, partial(call, Net()))
        assert text.startswith(f"{name}: the module has no converted layer; call convert_to")


@on_ranks(4)
def test_a_distributed_model_has_the_summary_of_the_whole() -> None:
    world = Distributed(2, 2, fsdp_arguments={"reshard_after_forward": False})
    found = {str(conversion_summary(world.twin))}
    with comm_audit() as audit:
        found.add(str(conversion_summary(world.net)))
    world.net(world.mine(randn(4, 8, 64)))
    with audit:
        found.add(str(conversion_summary(world.net)))
    assert len(found) == 1
    assert audit.count() == 0


@pytest.mark.parametrize("attached", [True, False])
@on_ranks(2, returns=[])
def test_weights_that_are_unsharded_at_the_update(attached: bool) -> list[str]:
    """The next forward does not use what FSDP2 gathered before the step."""
    world = Distributed(2, 1)
    world.net.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(world.net.parameters(), lr=10.0)
    if attached:
        attach_update(optimizer, world.net)
    x = world.mine(randn(4, 8, 64))
    world.net(x).square().mean().backward()
    optimizer.step()
    if not attached:
        update_float8_scales(world.net)
    with weights_used(world.net) as used:
        world.net(x)
    return wrong_casts(used, full_state(world.net))
