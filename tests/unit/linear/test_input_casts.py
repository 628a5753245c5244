"""A layer multiplies the values that its input has at the call, whoever wrote them, and how."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from recipe_algebra import RECIPES, config_of, layer_of, step
from reference import same_bits
from torch import Tensor, nn

from fp8_dist.debug import float8_stats

ROWS, FEATURES = 48, 64


def replaced(x: Tensor) -> None:
    x.data = x.data * 3


def moved(x: Tensor) -> None:
    x.untyped_storage().resize_(2 * x.untyped_storage().nbytes())
    x.data.mul_(3)


def by_numpy(x: Tensor) -> None:
    array = x.detach().numpy()
    array *= 3


def counted(x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(3)


def by_a_collective(x: Tensor) -> None:
    dist.all_gather([x.detach()], x.detach() * 3)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "counted": counted,
    "data": lambda x: x.data.mul_(3),
    "other data": replaced,
    "a part of data": lambda x: x.data[1:].mul_(3),
    "other memory": moved,
    "numpy": by_numpy,
    "dlpack": lambda x: torch.from_dlpack(x.detach()).mul_(3),
    "storage": lambda x: x.untyped_storage().copy_((x.detach() * 3).untyped_storage()),
    "collective": by_a_collective,
}


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("is_observed", [False, True])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_write_between_two_layers(recipe: str, write: str, is_observed: bool) -> None:
    """Autograd keeps what the first layer saved of the values before the write."""
    x, g = (torch.randn(ROWS, FEATURES) for _ in range(2))
    weights = torch.randn(2, FEATURES, FEATURES)
    layers, alone = ([layer_of(config_of(recipe), w) for w in weights] for _ in range(2))
    observes = float8_stats(nn.ModuleList(layers)) if is_observed else nullcontext()
    expected = [step(alone[0], x, g)]
    with observes, one_rank():
        outputs = [layers[0](x)]
        WRITES[write](x)
        outputs.append(layers[1](x))
    expected.append(step(alone[1], x.clone(), g))
    for output, results in zip(outputs, expected, strict=True):
        assert same_bits(output.detach(), results["output"])
    if config_of(recipe).gemm_enabled("grad_weight"):  # otherwise x itself is saved
        for layer, output, results in zip(layers, outputs, expected, strict=True):
            output.backward(g)
            assert same_bits(layer.weight.grad, results["grad_weight"])
