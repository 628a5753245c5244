"""The short way through a layer gives the bits of the general one."""

from itertools import product

import pytest
import torch
from reference import same_bits
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_dist import Float8Linear, Float8LinearConfig, function

SHAPES = [(48,), (1, 48), (5, 48), (2, 3, 48), (0, 48), (2, 0, 48), (2, 2, 3, 48), (400, 48)]


class Watching(TorchDispatchMode):
    """Sees every operator, and so keeps the library from taking short cuts."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def results(layer: Float8Linear, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Output and gradients of a step."""
    layer.weight_cache.drop()
    layer.zero_grad()
    x.grad = None
    output = layer(x)
    if output.requires_grad:
        output.backward(torch.linspace(-3, 2, output.numel()).reshape(output.shape).to(output))
    found = [output.detach(), x.grad, *(p.grad for p in layer.parameters())]
    return [None if t is None else t.clone() for t in found]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_both_ways_give_the_same_bits(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    short: list[int] = []
    apply = function.TensorwiseFunction.apply
    monkeypatch.setattr(
        function.TensorwiseFunction, "apply", lambda *args: short.append(1) or apply(*args)
    )
    for bias, x_learns, weight_learns in product((False, True), repeat=3):
        layer = Float8Linear(48, 33, bias=bias, dtype=dtype)
        layer.weight.requires_grad_(weight_learns)
        x = (torch.randn(shape) * 4).to(dtype).requires_grad_(x_learns)
        short.clear()
        found = results(layer, x)
        assert short == [1]
        with Watching():
            expected = results(layer, x)
        assert short == [1]
        for mine, general in zip(found, expected, strict=True):
            assert (mine is None) == (general is None)
            assert mine is None or general is None or same_bits(mine, general)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_folded", "rowwise_with_gw_hp", "delayed"])
def test_it_is_not_taken_with_other_recipes(recipe: str) -> None:
    assert not Float8LinearConfig.from_recipe_name(recipe).is_tensorwise
