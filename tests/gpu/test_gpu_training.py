"""On a GPU: training steps in every recipe, eager and compiled, compared with the CPU."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

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
from fp8_dist.debug import CastStats, float8_stats

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
RECIPES = [recipe.value for recipe in Float8LinearRecipeName]
# Rounding to bf16 leaves more, a wrong operand less.
LEAST_DB = 40


def layers(recipe: str, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Two layers on the GPU, with an exact function between them."""
    model = nn.Sequential(
        nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 64, bias=False)
    ).to(DEVICE, dtype)
    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def batch(step: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(32, 64, generator=generator).to(device, dtype)


def trained(
    model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], device: str, lr: float = 0.05
) -> list[torch.Tensor]:
    """Train, and return the outputs and gradients of each step, then the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    seen = []
    for step in range(4):
        x = batch(step, device).requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        output = forward(x)
        output.backward(batch(100 + step, device))
        found = [output, x.grad, *(p.grad for p in model.parameters())]
        seen += [each.detach().clone().cpu() for each in found]
        optimizer.step()
        optimizer.zero_grad()
        update_float8_scales(model)
    return seen + [p.detach().cpu() for p in model.parameters()]


def assert_close(
    found: list[torch.Tensor], expected: list[torch.Tensor], least: float = LEAST_DB
) -> None:
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine.dtype is theirs.dtype
        assert sqnr(theirs.cpu(), mine.cpu()) > least, i


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_computes_what_it_does_on_a_cpu(recipe: str, dtype: torch.dtype) -> None:
    config = Float8LinearConfig.from_recipe_name(recipe)
    on_cpu = Float8Linear(64, 48, dtype=dtype, config=config)
    on_gpu = copy.deepcopy(on_cpu).to(DEVICE)
    results = []
    for layer, device in ((on_cpu, "cpu"), (on_gpu, DEVICE)):
        x = batch(0, device, dtype).requires_grad_()
        output = layer(x)
        output.backward(batch(1, device, dtype)[:, :48])
        results.append([output, x.grad, *(p.grad for p in layer.parameters())])
    assert_close(results[1], results[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_that_are_not_aligned(recipe: str) -> None:
    config = Float8LinearConfig.from_recipe_name(recipe)
    for rows in (0, 1, 33):
        layer = Float8Linear(64, 48, device=DEVICE, dtype=torch.bfloat16, config=config)
        x = torch.randn(rows, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad.shape == x.shape
        assert x.grad.isfinite().all()
        assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_steps_are_eager_steps(recipe: str, mode: str) -> None:
    torch._dynamo.reset()
    eager = layers(recipe)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, mode=mode, fullgraph=True, dynamic=False)
    expected = trained(eager, eager, DEVICE)
    first = expected[0]
    # The weights must change by more than the two may differ.
    assert sqnr(first, layers(recipe)(batch(0, DEVICE)).cpu()) < LEAST_DB
    assert_close(trained(model, compiled, DEVICE), expected, 30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_autocast(recipe: str, compiled: bool, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    config = Float8LinearConfig.from_recipe_name(recipe)
    on_cpu = Float8Linear(64, 48, config=config)
    on_gpu = copy.deepcopy(on_cpu).to(DEVICE)
    results = []
    for layer, device in ((on_cpu, "cpu"), (on_gpu, DEVICE)):
        x = batch(0, device, torch.float32).requires_grad_()
        run = torch.compile(layer, fullgraph=True) if compiled and layer is on_gpu else layer
        with torch.autocast(device, dtype):
            output = run(x)
        assert output.dtype is dtype
        output.backward(batch(1, device, dtype)[:, :48])
        results.append([output, x.grad, *(p.grad for p in layer.parameters())])
    assert_close(results[1], results[0])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_does_not_wait_for_the_device(recipe: str, compiled: bool) -> None:
    torch._dynamo.reset()
    model = layers(recipe)
    run = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = batch(0, DEVICE)
    for step in range(4):
        # In the first two steps kernels are compiled, and histories and optimizer states created.
        with no_waiting() if step > 1 else nullcontext():
            for _ in range(2):
                run(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            update_float8_scales(model)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise an error if the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_statistics(recipe: str, compiled: bool) -> None:
    """Statistics must not make the host wait for the device in a step."""
    torch._dynamo.reset()
    model = layers(recipe)
    forward = torch.compile(model) if compiled else model
    stats = float8_stats(model)
    x, gradient = batch(0, DEVICE).requires_grad_(), batch(1, DEVICE)
    for step in range(2):
        # (In the first step kernels, graphs and the first scales of histories are created.)
        with stats.at(step), no_waiting() if step else nullcontext():
            forward(x).backward(gradient)
    rows = [row for row in stats.rows if isinstance(row, CastStats) and row.step == 1]
    assert len(rows) >= 2 * 3
    assert all(row.amax > 0 and row.sqnr > 20 for row in rows)
