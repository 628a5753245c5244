"""torch's FlopCounterMode counts the GEMMs in graphs of float8 layers."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fp8_dist import Float8LinearConfig, convert_to_float8_training

RECIPES = pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])


def made(recipe: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU())
    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def flops(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@RECIPES
def test_compiled(recipe: str) -> None:
    model, x = made(recipe), torch.randn(32, 64, requires_grad=True)
    compiled = torch.compile(model, backend="aot_eager")
    loss = compiled(x).sum()
    assert flops(loss.backward) == 2 * 2 * 32 * 64 * 96  # in the graph
    assert flops(lambda: compiled(x)) == 2 * 32 * 64 * 96  # torch then runs the forward eagerly


@RECIPES
def test_exported(recipe: str) -> None:
    x = torch.randn(32, 64)
    program = torch.export.export(made(recipe).requires_grad_(False), (x,)).module()
    assert flops(lambda: program(x)) == 2 * 32 * 64 * 96
