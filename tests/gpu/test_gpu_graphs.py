"""On a GPU: CUDA graphs of a layer's step, and of whole steps under FSDP2."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from reference import sqnr
from test_gpu_training import batch as unscaled_batch
from test_gpu_training import layers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    convert_to_float8_training,
    update_float8_scales,
)
from fp8_dist.fsdp import clip_grad_norm_

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DYNAMIC = [recipe.value for recipe in Float8LinearRecipeName if recipe.value != "delayed"]
Results = list[torch.Tensor]
LEAST_DB = 60  # the same kernels run on the same numbers


def batch(step: int) -> torch.Tensor:
    return (step + 1) * unscaled_batch(step, DEVICE)


def in_side_stream(run: Callable[[], object]) -> None:
    """Warm up on a side stream before a capture, as torch requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)


def a_step(run: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, step: int) -> Results:
    """Run a step; return the output and the gradients."""
    x = batch(step).requires_grad_()
    output = run(x)
    output.backward(batch(4 + step))
    return [t.detach().clone() for t in (output, x.grad, *(p.grad for p in model.parameters()))]


def assert_same_step(found: Results, expected: Results, step: int) -> None:
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert sqnr(theirs, mine) > LEAST_DB, (step, i)


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_a_captured_step(recipe: str) -> None:
    model = layers(recipe)
    twin = copy.deepcopy(model)
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
        assert_same_step(found, a_step(twin, twin, i), i)
        for optimizer, each in zip(optimizers, (model, twin), strict=True):
            optimizer.step()
            update_float8_scales(each)
        for p in twin.parameters():
            p.grad = None


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_eager_code_after_a_capture(recipe: str) -> None:
    """Statistics that are computed during a capture must not be used outside of the graph."""
    model = layers(recipe)
    twin = copy.deepcopy(model)
    x = batch(0)
    in_side_stream(lambda: model(x))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(x)
    assert_same_step(a_step(model, model, 0), a_step(twin, twin, 0), 0)


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


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    backend = "nccl" if dist.is_nccl_available() else "fake"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(DEVICE, (1,))
    finally:
        dist.destroy_process_group()


def trained(recipe: str, gathers: bool, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, device=DEVICE) for _ in range(3)))
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, enable_fsdp_float8_all_gather="auto" if gathers else False)
    convert_to_float8_training(model, config=config)
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return model, torch.optim.AdamW(model.parameters(), lr=0.02, foreach=True, capturable=True)


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("recipe", DYNAMIC)
def test_captured_steps_under_fsdp2(recipe: str, gathers: bool, mesh: DeviceMesh) -> None:
    (model, optimizer), (twin, twins) = (trained(recipe, gathers, mesh) for _ in range(2))
    x = batch(0)

    def step(model: nn.Module, optimizer: torch.optim.AdamW, x: torch.Tensor) -> torch.Tensor:
        update_float8_scales(model)
        loss = model(x).float().square().mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def assert_same_weights() -> None:
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.to_local(), theirs.to_local())  # type: ignore[attr-defined]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(model, optimizer, x)
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(2):
        step(twin, twins, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = step(model, optimizer, x)
    assert_same_weights()
    for i in range(5):
        x.copy_(batch(i))
        graph.replay()
        assert torch.equal(loss, step(twin, twins, x)), i
        assert_same_weights()
        with torch.no_grad():
            assert torch.equal(model(x), twin(x)), i
        update_float8_scales(model)  # the next replay changes what this found
    assert torch.equal(step(model, optimizer, x), step(twin, twins, x))
    assert_same_weights()
