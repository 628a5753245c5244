"""On a GPU: a step of experts in every recipe, compared with the CPU."""

from collections.abc import Sequence
from typing import get_args

import pytest
import torch
from reference import sqnr

from fp8_dist.kernels.grouped import Groups
from fp8_dist.moe import Float8ExpertsConfig, Routing, dispatch_linear, linear_combine, route
from fp8_dist.moe.config import ExpertsRecipe

pytestmark = pytest.mark.gpu

IN, OUT = 256, 384
LEAST_DB = 40


def routed(counts: Sequence[int], device: str) -> Routing:
    """A routing of tokens in random order, with the given numbers of tokens per expert."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    routing = route(ids[torch.randperm(len(ids))].unsqueeze(1), len(counts))
    of = routing.groups
    groups = Groups(of.on_host, *(x.to(device) for x in (of.sizes, of.group_of_row, of.ends)))
    return routing._replace(slots=routing.slots.to(device), groups=groups)


def step(recipe: str, counts: Sequence[int], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """The output and gradients of a layer of experts."""
    torch.manual_seed(0)
    config, rows, experts = Float8ExpertsConfig.from_recipe_name(recipe), sum(counts), len(counts)
    routing = routed(counts, device)
    shapes = (rows, 1, IN), (rows, IN), *[(experts, OUT, IN)] * 2, (experts, IN, OUT)
    grad, *given = (torch.randn(shape).to(device, dtype) for shape in shapes)
    x, gate, up, down = (each.requires_grad_() for each in given)
    both = dispatch_linear(x, [gate, up], routing, config)
    output = linear_combine(both[0] * both[1], down, routing, config)
    output.backward(grad)
    return [output, *(each.grad for each in given)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [(0, 1, 15, 17, 512), (0, 16, 32, 512)], ids=str)
@pytest.mark.parametrize("recipe", get_args(ExpertsRecipe))
def test_a_step_is_that_of_the_cpu(
    recipe: str, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    found, expected = (step(recipe, counts, dtype, device) for device in ("cuda", "cpu"))
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert sqnr(theirs, mine.cpu()) > LEAST_DB, i
