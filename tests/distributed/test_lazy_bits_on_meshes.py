"""Activations whose negation torch has postponed, under tensor parallelism."""

import pytest
import torch
from nets import Distributed
from ranks import RankPools
from recipe_algebra import RECIPES, config_of
from reference import same_bits


def step(world: Distributed, lazy: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, grad = (world.mine(torch.randn(2, 8, 64, generator=generator)) for _ in range(2))
    if lazy:
        x, grad = (torch.complex(torch.zeros_like(t), -t).conj().imag for t in (x, grad))
    world.net.zero_grad()
    x = x.detach().requires_grad_()
    output = world.net.layers[0](x)
    output.backward(grad)
    assert x.grad is not None
    weights = [parameter.grad.to_local() for parameter in world.net.layers[0].parameters()]  # type: ignore[union-attr]
    return [output.detach(), x.grad, *weights]


def differing(recipes: list[str]) -> list[str]:
    wrong = []
    for recipe in recipes:
        for sequence_parallel in (False, True):
            world = Distributed(
                tp=2, sequence_parallel=sequence_parallel, config=config_of(recipe), gather=False
            )
            pairs = zip(step(world, False), step(world, True), strict=True)
            if not all(same_bits(expected, found) for expected, found in pairs):
                wrong.append(f"{recipe}, {sequence_parallel=}")
    return wrong


@pytest.mark.filterwarnings("ignore")
def test_inputs_and_gradients(ranks: RankPools) -> None:
    assert ranks(2).run_same(differing, RECIPES) == []
