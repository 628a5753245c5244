"""torch's FlopCounterMode counts the GEMMs of float8 layers and experts like other GEMMs."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from moe_layers import RECIPES as EXPERTS_RECIPES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fp8_dist import (
    Float8LinearConfig,
    Float8LinearRecipeName,
    convert_to_float8_training,
    freeze_to_float8,
)
from fp8_dist.moe import Float8ExpertsConfig, grouped_linear

RECIPES = [recipe.value for recipe in Float8LinearRecipeName]
Run = Callable[[nn.Module, Tensor], Tensor]


def flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call().sum().backward()
    return counter.get_total_flops()


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(model, x, use_reentrant=False)
    return result


RUNS: dict[str, Run] = {"eager": lambda model, x: model(x), "checkpointed": checkpointed}


def model(recipe: str | None, features: int = 64) -> nn.Sequential:
    # The last GEMM is not the last operator, which a checkpoint would not recompute.
    layers = [nn.Linear(features, 128), nn.GELU(), nn.Linear(128, features), nn.GELU()]
    made = nn.Sequential(*layers)
    if recipe is not None:
        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(made, config=config)
    return made


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers(recipe: str, run: str) -> None:
    x = torch.randn(2, 15, 64, requires_grad=True)
    found = [flops(partial(RUNS[run], model(each), x)) for each in (None, recipe)]
    gemms = 4 if run == "checkpointed" else 3
    assert found == [gemms * 2 * 30 * 64 * 128 * 2] * 2


@pytest.mark.filterwarnings("ignore:.*A GPU will refuse")
@pytest.mark.parametrize("recipe", RECIPES)
def test_sizes_that_are_padded_and_weights_without_a_gradient(recipe: str) -> None:
    made = model(recipe, features=37)
    made[0].requires_grad_(False)
    x = torch.randn(30, 37)
    assert flops(lambda: made(x)) == (1 + 2) * 2 * 30 * 37 * 128


def test_stored_weights() -> None:
    made = model("blockwise").requires_grad_(False)
    freeze_to_float8(made)
    x = torch.randn(32, 64, requires_grad=True)
    assert flops(lambda: made(x)) == 2 * 2 * 32 * 64 * 128 * 2


@pytest.mark.parametrize("recipe", EXPERTS_RECIPES)
def test_experts(recipe: str) -> None:
    x, w = torch.randn(32, 64, requires_grad=True), torch.randn(4, 96, 64, requires_grad=True)
    offs = torch.tensor([*accumulate([5, 3, 0, 24])])
    config = Float8ExpertsConfig.from_recipe_name(recipe)
    assert flops(lambda: grouped_linear(x, w, offs, config)) == 3 * 2 * 32 * 64 * 96
    assert flops(lambda: grouped_linear(x, w.detach(), offs, config)) == 2 * 2 * 32 * 64 * 96
