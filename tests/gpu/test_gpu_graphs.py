"""On a GPU: CUDA graphs of a layer's step, replayed after the weights have changed."""

import copy

import pytest
import torch
from reference import sqnr
from torch import nn

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    convert_to_float8_training,
    update_float8_scales,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DYNAMIC = [recipe.value for recipe in Float8LinearRecipeName if recipe.value != "delayed"]
LEAST_DB = 60  # the same kernels run on the same numbers


def pair(recipe: str) -> tuple[nn.Sequential, nn.Sequential]:
    """A model and its twin."""
    model = nn.Sequential(
        nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 64, bias=False)
    ).to(DEVICE, torch.bfloat16)
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    return model, copy.deepcopy(model)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(32, 64, generator=generator) * (step + 1)).to(DEVICE, torch.bfloat16)


def in_side_stream(run: object, times: int = 3) -> None:
    """Runs what is about to be captured, as torch asks for it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            run()  # type: ignore[operator]
    torch.cuda.current_stream().wait_stream(stream)


def eager_step(model: nn.Module, step: int) -> list[torch.Tensor]:
    """Output and gradients."""
    x = batch(step).requires_grad_()
    output = model(x)
    output.backward(batch(4 + step))
    return [output.detach(), x.grad, *(p.grad for p in model.parameters())]


def assert_same_step(found: list[torch.Tensor], expected: list[torch.Tensor], step: int) -> None:
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert sqnr(theirs, mine) > LEAST_DB, (step, i)


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_a_captured_step(recipe: str) -> None:
    model, twin = pair(recipe)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (model, twin)]
    x, grad = batch(0).requires_grad_(), batch(4)

    def step() -> torch.Tensor:
        x.grad = None
        for p in model.parameters():
            p.grad = None
        output = model(x)
        output.backward(grad)
        return output

    in_side_stream(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    for i in range(4):
        with torch.no_grad():
            x.copy_(batch(i))
            grad.copy_(batch(4 + i))
        graph.replay()
        found = [each.detach().clone() for each in (output, *gradients)]
        assert_same_step(found, eager_step(twin, i), i)
        for optimizer, each in zip(optimizers, (model, twin), strict=True):
            optimizer.step()
            update_float8_scales(each)
        for p in twin.parameters():
            p.grad = None


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_graphed_callables(recipe: str) -> None:
    model, twin = pair(recipe)
    graphed = torch.cuda.make_graphed_callables(model, (batch(0).requires_grad_(),))
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (model, twin)]
    for i in range(4):
        x = batch(i).requires_grad_()
        output = graphed(x)
        output.backward(batch(4 + i))
        found = [each.detach().clone() for each in (output, x.grad)]
        found += [p.grad.clone() for p in model.parameters()]
        assert_same_step(found, eager_step(twin, i), i)
        for optimizer, each in zip(optimizers, (model, twin), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            update_float8_scales(each)


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_eager_code_after_a_capture(recipe: str) -> None:
    """What is computed while a graph is captured is not used outside of it."""
    model, twin = pair(recipe)
    x = batch(0)
    in_side_stream(lambda: model(x))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(x)
    assert_same_step(eager_step(model, 0), eager_step(twin, 0), 0)


def test_delayed_scales_are_refused() -> None:
    config = Float8LinearConfig.from_recipe_name("delayed")
    layer = Float8Linear(64, 48, device=DEVICE, dtype=torch.bfloat16, config=config)
    x = batch(0)
    for _ in range(2):
        layer(x).sum().backward()
        update_float8_scales(layer)
    with (
        pytest.raises(NotImplementedError, match="a CUDA graph is being captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        layer(x)
    layer(x).sum().backward()
