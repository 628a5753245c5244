"""A scale is used only for the values it was computed from."""

import dataclasses
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from nets import Distributed, Net, blocks, full
from rank_tests import on_ranks
from ranks import device_mesh
from reference import all_warnings, raised
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fp8_dist import (
    Float8LinearConfig,
    attach_update,
    convert_to_float8_training,
    float8_layers,
    precompute_float8_dynamic_scale,
    update_float8_scales,
)
from fp8_dist.debug import comm_audit
from fp8_dist.mesh import local_tensor


def load_into(net: nn.Module, assign: bool) -> None:
    state = {k: v * 10 if "weight" in k else v for k, v in net.state_dict().items()}
    net.load_state_dict(state, assign=assign)


def load_by_swapping(net: nn.Module) -> None:
    """torch's other way to load exchanges the insides of two tensors, version counters included."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        load_into(net, False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def scaled_step(net: nn.Module) -> None:
    """A GradScaler that finds an inf skips the step; the next one takes it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=10.0)
    scaler.scale(torch.ones(()))  # the scaler makes its state here
    gradients = [parameter.grad for parameter in net.parameters()]
    first = next(net.parameters())
    before = full(first.detach()).clone()
    for factor, changes in ((torch.inf, False), (1.0, True)):
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.grad = gradient.sign() * factor
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(full(first.detach()), before) is not changes


def load_in_place(net: nn.Module) -> None:
    """As a distributed checkpoint does: into the tensors of a state_dict."""
    with tempfile.TemporaryDirectory() as folder:
        scaled = {name: value * 10 for name, value in net.state_dict().items()}
        paths: list[str] = [folder]
        dist.broadcast_object_list(paths)
        dcp.save(scaled, checkpoint_id=paths[0])
        dcp.load(net.state_dict(), checkpoint_id=paths[0])
        dist.barrier()


def edit_on_one_rank(net: Net) -> None:
    if dist.get_rank() == 0:
        for weight in (net.layers[0].w1.weight, net.layers[1].w2.weight):
            local = local_tensor(weight)
            getattr(local, "plain", local).detach().mul_(10)
            increment_version(weight)
    precompute_float8_dynamic_scale(net)


def step_with(make: Callable[..., torch.optim.Optimizer]) -> Callable[[nn.Module], None]:
    return lambda net: make(net.parameters()).step() and None


# (tests/distributed/test_noticed_writes.py has others.)
CHANGES: dict[str, Callable[[Net], object]] = {
    "SGD for-loop": step_with(lambda p: torch.optim.SGD(p, lr=10.0, foreach=False)),
    "AdamW foreach": step_with(lambda p: torch.optim.AdamW(p, lr=1.0, foreach=True)),
    "AdamW fused": step_with(lambda p: torch.optim.AdamW(p, lr=1.0, fused=True)),
    "GradScaler": scaled_step,
    "load_state_dict by swapping": load_by_swapping,
    "load_state_dict(assign=True)": lambda net: load_into(net, True),
    "a distributed checkpoint": load_in_place,
    "an edit on one rank, and precompute": edit_on_one_rank,
    "module.to": lambda net: net.to(torch.bfloat16),
    "a distributed checkpoint, before any forward": load_in_place,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dp", "tp", "gather"), [(1, 1, True), (1, 2, True), (2, 2, False), (2, 2, True)]
)
@on_ranks("dp", "tp", returns={})
def test_no_scale_is_stale_after_a_change(dp: int, tp: int, gather: bool) -> dict[str, list[str]]:
    """Layers whose forward after a change uses another cast than that of their values."""
    found = {}
    for number, (change, make) in enumerate(CHANGES.items()):
        # In high precision, every other change; not module.to: FSDP2 keeps gathering the old dtype.
        if not gather and (number % 2 or change == "module.to"):
            continue
        world = Distributed(dp, tp, gather=gather)
        precompute_float8_dynamic_scale(world.net)
        x = world.mine(torch.randn(4, 8, 64))
        if not change.endswith("before any forward"):
            world.net(x).square().mean().backward()
        make(world.net)
        x = x.to(next(world.net.parameters()).dtype)
        with torch.set_grad_enabled((number + dp + tp) % 2 == 0):
            found[change] = world.wrong_casts(partial(world.net, x))
    return {change: wrong for change, wrong in found.items() if wrong}


@pytest.mark.parametrize(("recipe", "dp", "tp"), [("rowwise", 1, 2), ("rowwise_folded", 2, 1)])
@on_ranks("dp", "tp", returns=[])
def test_a_layer_that_follows_another_config(recipe: str, dp: int, tp: int) -> list[str]:
    """Neither scales that are known for the former config, nor its gathers, serve the new one."""
    gather: dict[str, Any] = {"enable_fsdp_float8_all_gather": dp > 1}
    config = Float8LinearConfig.from_recipe_name(recipe)
    world = Distributed(dp, tp, config=dataclasses.replace(config, **gather))
    precompute_float8_dynamic_scale(world.net)
    for layer in float8_layers(world.net).values():
        layer.config = Float8LinearConfig(**gather)
    x = world.mine(torch.randn(4, 8, 64))
    return world.wrong_casts(torch.no_grad()(lambda: world.net(x)))


@pytest.mark.parametrize(
    ("recipe", "dp", "tp", "compiled", "precomputes"),
    [
        pytest.param("tensorwise", 1, 2, True, False, marks=pytest.mark.full),
        ("rowwise", 1, 2, False, True),
        ("blockwise", 2, 1, False, False),
        ("rowwise_folded", 2, 1, False, False),  # no other rank is needed
    ],
)
@on_ranks("dp", "tp")
def test_a_forgotten_update_is_said_by_name(
    recipe: str, dp: int, tp: int, compiled: bool, precomputes: bool
) -> None:
    """Each step but the first warns. Evaluations don't, though one may serve as the first."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    world = Distributed(dp, tp, config=config, shard=False, net_arguments={"layers": 1})
    net, x = blocks(world) if compiled else world.net, world.mine(torch.randn(4, 8, 64))
    for block in net if compiled else ():
        block.compile(backend="aot_eager", fullgraph=True)
    world.fully_shard(net, net if compiled else world.net.layers)
    if precomputes:
        update_float8_scales(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def dry_run() -> None:
        net(x).sum().backward()
        optimizer.zero_grad()

    def accumulate() -> None:
        for _ in range(2):
            checkpoint(net, x, use_reentrant=False).sum().backward()

    def evaluate() -> None:
        net.eval()
        with torch.no_grad():
            net(x)
        net.train()

    found = []
    steps = [accumulate, optimizer.step, accumulate, optimizer.step, accumulate]
    for part in (dry_run, evaluate, *steps, evaluate):
        with all_warnings() as texts:
            part()
        found.append([text for text in texts if "scale" in text])
    expected = recipe != "rowwise_folded"
    assert [len(texts) for texts in found] == [0, 0, 0, 0, expected, 0, expected, 0]
    for text in (*found[4], *found[6]):
        assert text.startswith("layers.0.w1: the weight was written to after its scales were comp")
        assert "Call attach_update(optimizer, model) once, or update_float8_scales(model)" in text


def functions_of_page() -> dict[str, Any]:
    """Those of docs/state.md that save and load."""
    page = (Path(__file__).parents[2] / "docs" / "state.md").read_text()
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    return names


def set_the_model(net: nn.Module) -> None:
    set_model_state_dict(net, {name: v * 10 for name, v in get_model_state_dict(net).items()})


LOADS = [load_in_place, partial(load_into, assign=False), load_by_swapping, set_the_model]


@pytest.mark.parametrize(("dp", "tp", "gather"), [(2, 1, True), (1, 2, True), (2, 2, False)])
@on_ranks("dp", "tp", returns=[])
def test_loads_are_no_changes_that_warn(dp: int, tp: int, gather: bool) -> list[str]:
    """As the page resumes a training, and in the midst of one."""
    world, page = Distributed(dp, tp, gather=gather), functions_of_page()
    net, x = world.net, world.mine(torch.randn(4, 8, 64))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    attach_update(optimizer, net)
    with tempfile.TemporaryDirectory() as folder, all_warnings() as texts:
        paths: list[str] = [folder]
        dist.broadcast_object_list(paths)
        page["save"](net, optimizer, paths[0])
        page["load"](net, optimizer, paths[0])
        for load in (*LOADS, lambda net: page["load"](net, optimizer, paths[0])):
            net(x).square().mean().backward()
            optimizer.step()
            load(net)  # and after the step that follows, a load finds what it has precomputed
            net(x)
        dist.barrier()
    return [text for text in texts if "scale" in text]


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
@on_ranks("dp", "tp", returns=[0, 1])
def test_other_changes_after_precompute_warn_once_in_training(dp: int, tp: int) -> list[int]:
    """In evaluation they don't, as where adapters are merged into the weights."""
    world, counts = Distributed(dp, tp), []
    for training in (False, True):
        precompute_float8_dynamic_scale(world.net)
        with all_warnings() as texts, torch.no_grad():
            for _ in range(2):
                world.net.layers[0].w1.weight.mul_(2)
                world.net.train(training)(world.mine(torch.randn(4, 8, 64)))
        counts.append(sum("scale" in text for text in texts))
    return counts


class Expert(nn.Module):
    """A layer that only some ranks use, beside one that all use; FSDP2 gathers both."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.expert = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, has_tokens: bool) -> torch.Tensor:
        y: torch.Tensor = self.shared(x)
        return self.expert(y) if has_tokens else y


@on_ranks(2, returns=True)
def test_ranks_without_tokens_in_an_evaluation_know_as_much_as_the_others() -> bool:
    """After an evaluation that uses a layer on rank 0 alone, ranks agree about its scale."""
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    net = convert_to_float8_training(Expert(), config=config)
    fully_shard(net, mesh=device_mesh(dp=2))
    x = torch.randn(16, 32)
    with torch.no_grad():
        net(x, has_tokens=dist.get_rank() == 0)
    net(x, has_tokens=True).sum().backward()
    return all(parameter.grad is not None for parameter in net.parameters())


def test_precompute_of_nothing_is_an_error() -> None:
    text = raised(ValueError, partial(precompute_float8_dynamic_scale, nn.Linear(2, 2)))
    assert "the module has no layer with a float8 weight of dynamic scale" in text


@on_ranks(2, returns=[])
def test_cpu_offload() -> list[str]:
    world = Distributed(2, 1, fsdp_arguments={"offload_policy": CPUOffloadPolicy(pin_memory=False)})
    precompute_float8_dynamic_scale(world.net)
    x = world.mine(torch.randn(4, 8, 64))
    return world.wrong_casts(lambda: world.net(x).sum().backward())


@pytest.mark.parametrize("backward", ["of a module", "of a tensor"])
@on_ranks(2)
def test_precompute_within_a_backward_is_refused(backward: str) -> None:
    world = Distributed(2, 1)
    x = world.mine(torch.randn(4, 8, 64)).requires_grad_()
    hook = partial(precompute_float8_dynamic_scale, world.net)
    first, second = world.net.layers
    if backward == "of a module":
        first.register_full_backward_hook(lambda *_: hook())
    between = first(x)
    if backward == "of a tensor":
        between.register_hook(lambda _: hook())
    text = raised(ValueError, lambda: second(between).sum().backward())
    assert text.startswith("precompute_float8_dynamic_scale: ")
    assert ": called within a backward of layers." in text


# Frozen weights


def frozen_base(recipe: str = "tensorwise") -> Distributed:
    """After a step; the second block is frozen, as the base beside trained adapters."""
    world = Distributed(2, 1, config=Float8LinearConfig.from_recipe_name(recipe))
    world.net.layers[1].requires_grad_(False)
    train(world)
    return world


def train(world: Distributed) -> None:
    optimizer = torch.optim.SGD([p for p in world.net.parameters() if p.requires_grad], lr=0.1)
    world.net(world.mine(torch.randn(6, 8, 64))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    update_float8_scales(world.net)


def evaluate(world: Distributed) -> None:
    with torch.no_grad():
        world.net(world.mine(torch.randn(6, 8, 64)))


@on_ranks(2, returns=([], 0))
def test_an_update_computes_scales_of_frozen_weights_anew() -> tuple[list[str], int]:
    """After a write that nothing notices: wrong casts, and amax all-reduces of a forward."""
    world = frozen_base()
    torch._foreach_mul_(list(world.net.state_dict().values()), 10.0)
    update_float8_scales(world.net)
    with comm_audit() as audit:
        wrong = world.wrong_casts(lambda: evaluate(world))
    return wrong, audit.count("all_reduce")


@pytest.mark.parametrize("gather", [False, True])
@on_ranks(4, returns=[])
def test_writes_to_weights_that_are_frozen_after_an_update(gather: bool) -> list[str]:
    """As PEFT merges adapters."""
    world = Distributed(2, 2, gather=gather)
    train(world)
    world.net.requires_grad_(False)
    wrong: list[str] = []
    for factor in (10.0, 0.1):
        for parameter in world.net.parameters():
            parameter.data *= factor
        x = world.mine(torch.randn(6, 8, 64)).requires_grad_()
        wrong += world.wrong_casts(partial(world.net, x))
        wrong += world.wrong_casts(lambda: evaluate(world))
    return wrong


@on_ranks(2)
def test_a_delayed_weight_that_is_frozen_takes_its_own_amax() -> None:
    """Weights shrink, so that until they are frozen their scales are not those of their amaxes."""
    world = frozen_base("delayed")
    with torch.no_grad():
        for parameter in world.net.parameters():
            parameter.mul_(0.3)
    found = []
    for _ in range(2):
        wrong = world.wrong_casts(lambda: evaluate(world))
        found.append([text.split(":")[0] for text in wrong])
        world.net.requires_grad_(False)
    trained, frozen = found
    assert trained == ["layers.0.w1", "layers.0.w3", "layers.0.w2"]
    assert frozen == []
