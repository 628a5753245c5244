"""Frozen weights beside trained ones: the casts are those of their present values."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from nets import Distributed
from rank_tests import on_ranks

from fp8_dist import Float8LinearConfig, invalidate_float8_scales, update_float8_scales
from fp8_dist.debug import comm_audit


def world_of(dp: int = 2, tp: int = 1, hidden: int = 96, recipe: str = "tensorwise") -> Distributed:
    """The second block is frozen, as the base beside trained adapters."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    world = Distributed(dp, tp, config=config, net_arguments={"hidden": hidden})
    world.net.layers[1].requires_grad_(False)
    return world


def train(world: Distributed, optimizer: torch.optim.Optimizer, batches: int = 2) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(batches):
        x = world.mine(torch.randn(6, 8, 64, generator=generator))
        world.net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluate(world: Distributed) -> None:
    with torch.no_grad():
        world.net(world.mine(torch.randn(6, 8, 64)))


def write_unnoticed(world: Distributed) -> None:
    torch._foreach_mul_(list(world.net.state_dict().values()), 10.0)


def write_and_invalidate(world: Distributed) -> None:
    torch._foreach_mul_([p.detach() for p in world.net.parameters()], 10.0)
    invalidate_float8_scales(world.net)


def step_with_gradients(world: Distributed) -> None:
    """A weight that is frozen before its last gradient was used."""
    parameters = list(world.net.parameters())
    world.net.requires_grad_(True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    world.net.requires_grad_(False)
    torch.optim.SGD(parameters, lr=10.0, foreach=True).step()


# (test_noticed_writes.py has those that are noticed.)
CHANGES = [write_unnoticed, write_and_invalidate, step_with_gradients]


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2, returns=([], 0))
def test_changed_weights_are_cast_anew(
    change: Callable[[Distributed], None],
) -> tuple[list[str], int]:
    """After a change of all weights and an update: wrong casts, amax all-reduces of a forward."""
    world = world_of()
    optimizer = torch.optim.SGD([p for p in world.net.parameters() if p.requires_grad], lr=0.1)
    wrong: list[str] = []
    for _ in range(2):
        update_float8_scales(world.net)
        train(world, optimizer)
    change(world)
    update_float8_scales(world.net)
    with comm_audit() as audit:
        wrong += world.wrong_casts(lambda: evaluate(world))
    return wrong, audit.count("all_reduce")


@pytest.mark.parametrize("gather", [False, True])
@on_ranks(4, returns=[])
def test_writes_to_weights_that_are_frozen_after_an_update(gather: bool) -> list[str]:
    """As PEFT merges adapters."""
    world = Distributed(2, 2, gather=gather)
    train(world, torch.optim.SGD(world.net.parameters(), lr=0.1))
    update_float8_scales(world.net)
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
    """Shrunken, so that its scale is not by its own amax before it is frozen."""
    world = world_of(recipe="delayed")
    optimizer = torch.optim.SGD([p for p in world.net.parameters() if p.requires_grad], lr=0.1)
    train(world, optimizer)
    update_float8_scales(world.net)
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
