"""update_float8_scales for each recipe on each mesh, and as a hook of optimizers (attach_update)."""

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from nets import Distributed, Net, full_state, wrong_casts
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import known, raised, same_bits, validity, weights_used
from torch import randn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR

import fp8_dist.text
from fp8_dist import (
    CastConfig,
    Float8LinearConfig,
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
from fp8_dist.weight.known import STALE

# FSDP2 alone gathers rows with their scales, and needs nothing.
RECIPES_ON_MESHES = [(2, 1, "tensorwise"), (2, 1, "rowwise_folded"), (2, 2, "rowwise")]
RECIPES_ON_MESHES += [(2, 2, "rowwise_with_gw_hp"), (2, 2, "mxfp8"), (2, 2, "delayed")]


def collectives(audit: Any) -> str:
    shown = [f"{row.op} of {row.elements} over {row.axis}" for row in audit.rows]
    return ", ".join(shown) or "nothing"


def updated_step(dp: int, tp: int, recipe: str) -> tuple[str, int]:
    """Compare a step after an update with a step without it. (`delayed` is synced in both.)

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
rowwise            dp 2 tp 2: all_reduce of 384 over world, 6 fewer in the step
rowwise_with_gw_hp dp 2 tp 2: all_reduce of 134 over world, 8 fewer in the step
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
        "blocks": replace(
            Float8LinearConfig.from_recipe_name("blockwise"), enable_fsdp_float8_all_gather="auto"
        ),
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
    assert names == ["float8", "blocks", "ignored", "input"]
    # Precompute: each weight has a slot per coordinate on the axis that its mesh lacks. Sync.
    assert collectives(audit) == "all_reduce of 8 over world, all_reduce of 1 over tp", (
        audit.table()
    )


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


# attach_update: wrapped optimizers, containers, and those that don't fit.


class Accelerated(Optimizer):
    """Stands for accelerate 1.15's AcceleratedOptimizer, which does not call Optimizer.__init__.

    (Its ``step`` also skips micro-steps and asks a GradScaler.)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class Container(Optimizer):
    """Stands for torchtitan 0.3.0's OptimizersContainer, which does call Optimizer.__init__."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__([p for group in groups for p in group["params"]], {})

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step()


class Lookahead(Optimizer):
    """Stands for wrappers that write to the weights after the step of the optimizer they hold."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for group in self.param_groups:
            for param in group["params"]:
                local_tensor(param.detach()).data.mul_(0.5)


class Optimizers(list[Optimizer]):
    """A container that is no optimizer itself."""

    def step(self) -> None:
        for each in self:
            each.step()


Pair = tuple[Any, Any]  # what steps, what is attached to


def adamw(net: nn.Module) -> AdamW:
    return AdamW(net.parameters(), lr=1e-2, fused=True)


def parts(net: nn.Module) -> list[Optimizer]:
    """An optimizer for each block, and then one for what is not in float8."""
    biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
    weights = [[layer.weight for layer in float8_layers(block).values()] for block in net.layers]
    return [AdamW(params, lr=1e-2, fused=True) for params in (*weights, biases)]


PAIRS: dict[str, Callable[[nn.Module], Pair]] = {
    "optimizer": lambda net: 2 * (adamw(net),),
    "accelerated": lambda net: 2 * (Accelerated(adamw(net)),),
    "scheduler": lambda net: (held := adamw(net), ConstantLR(held)),
    "container": lambda net: 2 * (Container(*parts(net)),),
    "inside of a container": lambda net: (held := Container(*parts(net)), held.optimizers[1]),
    "list": lambda net: 2 * (Optimizers(parts(net)),),
    "lookahead": lambda net: 2 * (Lookahead(adamw(net)),),
}


def steps(pair: str, is_attached: bool) -> tuple[list[int], list[Any]]:
    """Amax all-reduces of each of two steps with their next forwards; the weights after that."""
    world = Distributed(2, 1)
    stepping, attached = PAIRS[pair](world.net)
    if is_attached:
        attach_update(attached, world.net)
    x = world.mine(torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(0)))
    found = []
    loss = world.net(x).square().mean()
    for _ in range(2):
        loss.backward()
        with comm_audit() as audit:
            stepping.step()
            loss = world.net(x).square().mean()
        found.append(audit.count("all_reduce", dtype=torch.int32))
    return found, [local_tensor(p.detach()) for p in world.net.state_dict().values()]


@on_ranks(2)
def test_one_all_reduce_per_step() -> None:
    without = {pair: steps(pair, False) for pair in ("optimizer", "scheduler", "lookahead")}
    for pair in PAIRS:
        found, weights = steps(pair, True)
        each, expected = without.get(pair, without["optimizer"])
        assert found == [1, 1], pair
        assert each == [6, 6]
        assert all(map(same_bits, weights, expected)), pair


def steps_in_backward(is_attached: bool) -> tuple[list[int], list[Any]]:
    """Amax all-reduces of three backwards with their next forwards; the weights then.

    Each optimizer steps as soon as the gradient of its one parameter is there. For the last
    backward nothing is attached.
    """

    def step(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    world = Distributed(2, 1)
    optimizers = {p: AdamW([p], lr=1e-2) for p in world.net.parameters()}
    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)
    handle = attach_update([*optimizers.values()], world.net) if is_attached else None
    x = world.mine(torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(0)))
    found = []
    loss = world.net(x).square().mean()
    for number in range(3):
        if number == 2 and handle:
            handle.remove()
        with comm_audit() as audit:
            loss.backward()
            loss = world.net(x).square().mean()
        found.append(audit.count("all_reduce", dtype=torch.int32))
    return found, [local_tensor(p.detach()) for p in world.net.state_dict().values()]


@pytest.mark.filterwarnings("ignore:.*changed after precompute.*")
@on_ranks(2)
def test_optimizers_that_step_in_backward() -> None:
    (found, weights), (each, expected) = (steps_in_backward(is_it) for is_it in (True, False))
    assert found == [1, 1, 6]
    assert each == [6, 6, 6]
    assert all(map(same_bits, weights, expected))


def states(net: nn.Module) -> set[int]:
    return {validity(layer.weight) for layer in float8_layers(net).values()}


@on_ranks(2, returns={STALE})
def test_scales_are_dropped_after_a_wrapper_that_writes() -> set[int]:
    """Only the inner optimizer has the hook, and the wrapper writes after its step."""
    world = Distributed(2, 1)
    held = Lookahead(AdamW(world.net.parameters()))
    attach_update(held.optimizer, world.net)
    world.net(world.mine(torch.randn(4, 8, 64))).square().mean().backward()
    held.step()
    return states(world.net)


def made_before_sharding() -> str:
    world = Distributed(2, 1, shard=False)
    optimizer = AdamW(world.net.parameters())
    world.fully_shard(world.net, world.net.layers)
    return raised(ValueError, lambda: attach_update(optimizer, world.net))


def test_an_optimizer_of_other_parameters_is_refused(ranks: RankPools) -> None:
    texts = [ranks(2).run_same(made_before_sharding)]
    net = convert_to_float8_training(Net())
    other = AdamW(nn.Linear(2, 2).parameters())
    for wrap in (lambda o: o, Accelerated, Container, lambda o: [o]):
        texts.append(raised(ValueError, partial(attach_update, wrap(other), net)))
    for message in texts:
        assert (
            "updates none of the module's 6 float8 weights (such as layers.0.w1.weight)" in message
        )
        assert "Make the optimizer, and call attach_update, after apply_tp_plan and" in message


@on_ranks(2)
def test_an_optimizer_made_before_a_part_was_sharded_is_refused() -> None:
    world = Distributed(2, 1, shard=False)
    optimizer = AdamW(world.net.parameters())
    fully_shard(world.net.layers[0])
    text = raised(ValueError, lambda: attach_update(optimizer, world.net))
    assert (
        "attach_update: the optimizer holds other parameters than 3 of the module's 6 float8 "
        "weights (such as layers.0.w1.weight), of the same shapes. Make the optimizer, and" in text
    )
    first, second = world.net.layers
    attach_update(AdamW(world.net.parameters()), second)  # holds those of the first layer, too
    attach_update([AdamW(second.parameters()), AdamW(first.parameters())], world.net)


@pytest.mark.parametrize("part", ["", "layers.0"])
@on_ranks(2)
def test_weights_that_are_sharded_after_attaching_are_refused(part: str) -> None:
    world = Distributed(2, 1, shard=False)
    optimizer = AdamW(world.net.parameters())
    attach_update(optimizer, world.net)
    fully_shard(world.net.get_submodule(part))
    x = world.mine(torch.randn(4, 8, 64))
    for _ in range(2):  # the error stays until the loop is mended
        world.net(x).square().mean().backward()
        text = raised(ValueError, optimizer.step)
        number = 3 if part else 6
        expected = (
            f"attach_update: {number} float8 weights (such as layers.0.w1.weight) were replaced"
        )
        assert text.startswith(expected)
        assert "Make the optimizer, and call attach_update, after apply_tp_plan and" in text


def test_an_optimizer_is_freed_with_its_last_reference() -> None:
    """Its states are large, and the garbage collector may not run for long."""
    net = convert_to_float8_training(Net())
    optimizer = AdamW(net.parameters())
    attach_update(optimizer, net)
    net(torch.randn(4, 8, 64)).square().mean().backward()
    optimizer.step()
    held = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert held() is None
    finally:
        gc.enable()


@on_ranks(2)
def test_weights_that_are_frozen_or_trained_after_attaching() -> None:
    """Nothing is replaced, so nothing is refused."""
    world = Distributed(2, 1)
    first, second = world.net.layers
    world.net.requires_grad_(False)
    second.requires_grad_(True)
    optimizer = AdamW(second.parameters())
    attach_update(optimizer, world.net)
    first.requires_grad_(True)
    second.requires_grad_(False)
    world.net(world.mine(torch.randn(4, 8, 64))).square().mean().backward()
    optimizer.step()


@on_ranks(2)
def test_a_plan_that_is_applied_after_attaching_is_refused() -> None:
    net = convert_to_float8_training(Net())
    optimizer = AdamW(net.parameters())
    attach_update(optimizer, net)
    whole = Float8ColwiseParallel(output_layouts=Replicate())
    apply_tp_plan(net, device_mesh(tp=2), {"layers.0.w1": whole})
    net(torch.randn(4, 8, 64)).square().mean().backward()
    text = raised(ValueError, optimizer.step)
    assert "attach_update: 1 float8 weights (such as layers.0.w1.weight) were replaced" in text
    attach_update(AdamW(net.parameters()), net).remove()


def test_arguments_of_other_kinds_are_refused() -> None:
    attach: Any = attach_update
    net = convert_to_float8_training(Net())
    for other in (net, None, [], "AdamW"):
        text = raised(TypeError, partial(attach, other, net))
        assert f"attach_update: a {type(other).__name__} is no torch.optim.Optimizer" in text
    text = raised(TypeError, lambda: attach(net, AdamW(net.parameters())))
    assert "expected a model (an nn.Module), got an AdamW" in text


@on_ranks(2, returns=(1, 1))
def test_attaching_while_weights_are_unsharded() -> tuple[int, int]:
    """After a forward, layers keep unsharded weights, which are not the optimizer's parameters."""
    world = Distributed(2, 1, fsdp_arguments={"reshard_after_forward": False})
    optimizer = AdamW(world.net.parameters())
    x = world.mine(torch.randn(4, 8, 64))
    world.net(x)
    attach_update(optimizer, world.net)
    world.net(x).square().mean().backward()
    with comm_audit() as audit:
        optimizer.step()
    return audit.count("all_reduce"), audit.count()


def test_frozen_float8_weights_need_no_optimizer() -> None:
    """As LoRA beside a float8 base: DELAYED inputs, for one, are still to be synced."""
    net = convert_to_float8_training(Net()).requires_grad_(False)
    attach_update(AdamW(nn.Linear(64, 64).parameters()), net)
    net.layers[1].requires_grad_(True)
    attach_update(AdamW([net.layers[1].w3.weight]), net)  # some of the weights are enough
