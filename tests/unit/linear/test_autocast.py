"""autocast, and layers that are fp16 themselves."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from autocast_steps import DTYPES, RECIPES, forward_and_backward, layer_of
from reference import same_bits
from torch import nn

# The least SQNR in dB of a float8 GEMM against the exact product, in any of the recipes.
FLOAT8_SQNR = 23.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_input_alone_is_cast(recipe: str, dtype: torch.dtype) -> None:
    """The input is cast as if it had the autocast dtype; the weight, from its stored values."""
    layer = layer_of(recipe)
    x, grad = torch.randn(32, 64), torch.randn(32, 48)
    found = forward_and_backward(layer, x, grad, dtype)
    assert [t.dtype for t in found] == [dtype] + [torch.float32] * 3
    expected = forward_and_backward(layer, x.to(dtype), grad, None)
    assert [t.dtype for t in expected[:2]] == [dtype, dtype]
    # (torch casts the gradient back to the dtype of the input.)
    expected[1] = expected[1].float()
    assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))
    if dtype is torch.bfloat16:  # a weight in bf16 gives other bits
        with torch.no_grad():
            layer.weight.copy_(layer.weight.to(dtype))
        assert not same_bits(forward_and_backward(layer, x, grad, dtype)[0], found[0])


@contextmanager
def other_device_autocast(dtype: torch.dtype) -> Iterator[None]:
    """autocast of another device type, on machines that don't have one too."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def test_only_that_of_the_inputs_device() -> None:
    layer, x = layer_of("tensorwise"), torch.randn(32, 64)
    with other_device_autocast(torch.float16):
        assert torch.is_autocast_enabled("cuda")
        assert same_bits(layer(x), layer(x.float()))
        assert layer(x).dtype is torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype is torch.bfloat16


def test_nested() -> None:
    layer, x = layer_of("tensorwise"), torch.randn(32, 64)
    plain = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            assert same_bits(layer(x), plain)
        with torch.autocast("cpu", torch.float16):
            assert layer(x).dtype is torch.float16
        assert layer(x).dtype is torch.bfloat16
        # What autocast leaves alone in nn.Linear.
        doubled = layer_of("tensorwise", torch.float64)
        assert doubled(x.double()).dtype is nn.Linear(64, 48).double()(x.double()).dtype


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("overflow", [False, True])
def test_large_fp16_values(recipe: str, overflow: bool) -> None:
    """Products are inf where they leave the range of fp16, as nn.Linear's are, and only there."""
    layer = layer_of(recipe, torch.float16, bias=False)
    limit = torch.finfo(torch.float16).max
    size = 0.2 if overflow else 0.001
    with torch.no_grad():
        layer.weight.copy_(torch.randn(48, 64) * size)
    x, grad = (torch.randn(32, 64).clamp(-1, 1) * limit).half(), (torch.randn(32, 48) * size).half()
    weight = layer.weight.detach().double()
    exact = [x.double() @ weight.t(), grad.double() @ weight, grad.double().t() @ x.double()]
    linear = layer.to_linear()
    expected = forward_and_backward(linear, x, grad, None)
    found = forward_and_backward(layer, x, grad, None)
    for product, a, b in zip(exact, expected, found, strict=True):
        # Near the limit float8's error decides, which is far below a third of the signal.
        signal = product.square().mean().sqrt()
        over, below = product.abs() > limit + signal / 3, product.abs() < limit - signal / 3
        assert torch.equal(a[over], b[over])
        noise = (product - b)[below].square().mean().sqrt()
        # The rule of OCP MX saturates the values that are at the limit here, a third of them, at
        # 448 / 512 of their size.
        least = 19 if recipe == "mxfp8" else FLOAT8_SQNR
        assert 20 * torch.log10(signal / noise) > least
    infinite = [bool(t.isinf().any()) for t in found]
    assert infinite == [overflow, False, overflow]


def test_an_fp16_product_is_summed_wider() -> None:
    # Partial sums leave the range of fp16, the sum does not.
    layer = layer_of("tensorwise", torch.float16, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    x = torch.full((4, 64), 60000.0, dtype=torch.float16)
    x[:, 32:] = -60000.0
    assert torch.equal(layer(x), torch.zeros(4, 48, dtype=torch.float16))
