"""Operands that several GEMMs multiply are made wide once, and nothing of that stays."""

import weakref
from typing import Any

import pytest
import torch
from reference import Watching, same_bits

from fp8_dist import Float8Linear, Float8LinearConfig
from fp8_dist.kernels import scaled_mm as matmul
from fp8_dist.kernels.upcast import upcast
from fp8_dist.linear import wide

ROWS, FEATURES = 96, 64


@pytest.fixture(autouse=True)
def nothing_left_before() -> None:
    wide._kept = None


@pytest.fixture
def made_wide(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what is converted, in order."""
    shapes: list[tuple[int, ...]] = []

    def recording(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if data.dtype is not dtype:
            shapes.append(tuple(data.shape))
        return upcast(data, dtype)

    for module in (matmul, wide):
        monkeypatch.setattr(module, "upcast", recording)
    return shapes


def layers(count: int, recipe: str = "tensorwise", out_features: int = 48) -> list[Float8Linear]:
    config = Float8LinearConfig.from_recipe_name(recipe)
    sizes: Any = FEATURES, out_features, False, None, torch.bfloat16
    return [Float8Linear(*sizes, config=config) for _ in range(count)]


def an_input() -> torch.Tensor:
    return torch.randn(ROWS, FEATURES, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_gradient_is_made_wide_once_for_both_gemms(
    recipe: str, made_wide: list[tuple[int, ...]]
) -> None:
    (layer,) = layers(1, recipe)
    x = an_input()
    layer(x).backward(torch.randn(ROWS, 48, dtype=torch.bfloat16))
    # Input and weight for the output; the gradient and the weight for the input's gradient. (The
    # input for the weight's is still there.)
    assert made_wide == [(96, 64), (64, 48), (96, 48), (48, 64)]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_folded"])
def test_an_input_is_made_wide_once_for_the_layers_that_share_it(
    recipe: str, made_wide: list[tuple[int, ...]]
) -> None:
    x = an_input()
    first, second, third = (layer(x) for layer in layers(3, recipe))
    assert made_wide.count((96, 64)) == 1
    other = an_input()
    layers(1)[0](other).sum().backward()
    del made_wide[:]
    (first.sum() + second.sum() + third.sum()).backward()
    assert made_wide.count((96, 64)) == 1


def test_nothing_stays_once_the_input_is_gone() -> None:
    (layer,) = layers(1)
    x = an_input() * 1
    output = layer(x)
    assert wide._kept is not None
    del x
    assert wide._kept is None  # though autograd keeps the float8 copy
    output.sum().backward()
    assert wide._kept is None
    with torch.no_grad():
        layer(an_input())
    assert wide._kept is None


def test_another_input_takes_the_place_of_the_last() -> None:
    data = [torch.randn(ROWS, FEATURES).to(torch.float8_e4m3fn) for _ in range(2)]
    first = weakref.ref(wide.shared_by_layers(data[0]))
    second = wide.shared_by_layers(data[1])
    assert first() is None
    assert wide.shared_by_layers(data[1]) is second
    assert torch.equal(wide.shared_by_layers(data[0]), data[0].bfloat16())


def test_data_that_was_written_to_is_made_wide_again() -> None:
    data = torch.randn(ROWS, FEATURES).to(torch.float8_e4m3fn)
    wide.shared_by_layers(data)
    data.view(torch.uint8).zero_()
    assert not wide.shared_by_layers(data).any()


def test_few_elements_and_inference_tensors_are_left_to_the_gemm() -> None:
    few = torch.randn(8, 8).to(torch.float8_e4m3fn)
    with torch.inference_mode():
        unversioned = torch.randn(ROWS, FEATURES).to(torch.float8_e4m3fn)
    high = torch.randn(ROWS, FEATURES)
    for data in (few, unversioned, high):
        assert wide.shared_by_layers(data) is data


@pytest.mark.parametrize("has", [1.0, float("nan")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sharing_changes_no_bit(
    dtype: torch.dtype, has: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for share in (True, False):
        torch.manual_seed(0)
        shared = [layer.to(dtype) for layer in layers(3)]
        x = an_input().detach().to(dtype)
        x[0, 0] = has
        x.requires_grad_()
        if not share:
            for module in ("autograd", "tensorwise"):
                monkeypatch.setattr(
                    f"fp8_dist.linear.{module}.shared_by_layers", lambda data, owner=None: data
                )
        outputs = [layer(x) for layer in shared]
        sum(y.square().sum() for y in outputs).backward()  # type: ignore[union-attr]
        found.append([*outputs, x.grad, *(layer.weight.grad for layer in shared)])
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def test_who_watches_sees_float8_gemms() -> None:
    (layer,) = layers(1)
    with Watching() as watching:
        layer(an_input()).sum().backward()
    assert watching.seen.count("fp8_dist.scaled_mm.default") == 3
    assert wide._kept is None


def test_a_graph_has_nothing_of_it() -> None:
    shared = layers(2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return shared[0](x) + shared[1](x)

    found = []
    for run in (forward, torch.compile(forward, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        x = an_input()
        run(x).square().sum().backward()
        found.append(x.grad)
    assert found[0] is not None
    assert found[1] is not None
    assert same_bits(*found)
