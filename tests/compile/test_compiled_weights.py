"""What compiled code multiplies where the weight it reads is not the layer's parameter."""

import pytest
import torch
from reference import same_bits

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    invalidate_float8_scales,
    precompute_float8_dynamic_scale,
)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm().detach() / exact.norm().detach())


@pytest.mark.parametrize("precomputed", [False, True])
def test_another_tensor_in_the_place_of_the_weight(precomputed: bool) -> None:
    layer, x = Float8Linear(32, 48, bias=False, config=Float8LinearConfig()), torch.randn(16, 32)
    if precomputed:
        precompute_float8_dynamic_scale(layer)

    def other(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    weight = (100 * layer.weight.detach()).requires_grad_()
    compiled = torch.compile(other, backend="aot_eager")
    assert error(compiled(weight), x @ weight.t()) < 0.05
    assert error(layer(x), x @ layer.weight.t()) < 0.05  # and nothing of the other is kept


def test_a_weight_that_the_graph_updates() -> None:
    layer, x = Float8Linear(32, 48, bias=False, config=Float8LinearConfig()), torch.randn(16, 32)

    @torch.compile(backend="aot_eager")
    def step() -> tuple[torch.Tensor, torch.Tensor]:
        before = layer(x)
        with torch.no_grad():
            layer.weight.mul_(100.0)
        return before, layer(x)

    for _ in range(2):
        exact = x @ layer.weight.detach().t()
        before, after = step()
        assert error(before, exact) < 0.05
        assert error(after, 100 * exact) < 0.05


def test_a_compiled_evaluation_uses_no_scale_that_training_has_left() -> None:
    """The weight grows by a write that nothing shows: by an old scale it would saturate."""
    layer, x = Float8Linear(32, 32), torch.randn(4, 32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    layer.weight.data.mul_(100)
    with torch.no_grad():
        found = compiled(x)
    invalidate_float8_scales(layer)
    assert same_bits(found, layer(x).detach())
