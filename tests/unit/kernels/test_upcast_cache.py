"""On CPUs the left operand of GEMMs in a row is upcast once, and its copy is dropped with it."""

import weakref
from typing import Any

import pytest
import torch
from reference import Watching, same_bits

from fp8_dist import CastConfig, Float8Linear, Float8LinearConfig, cast_to_float8, kernels
from fp8_dist.kernels.cpu import gemm
from fp8_dist.kernels.cpu import upcast as upcasting
from fp8_dist.kernels.cpu.gemm import left_upcasts
from fp8_dist.kernels.cpu.upcast import UpcastCache, upcast
from fp8_dist.tensor import scaled_mm

ROWS, FEATURES, OUT = 96, 64, 48
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    left_upcasts._entry = None


@pytest.fixture
def upcasts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the data that is upcast, in order."""
    shapes: list[tuple[int, ...]] = []

    def recording(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        shapes.append(tuple(data.shape))
        return upcast(data, dtype)

    for module in (gemm, upcasting):
        monkeypatch.setattr(module, "upcast", recording)
    return shapes


def layers(count: int, recipe: str = "tensorwise") -> list[Float8Linear]:
    config = Float8LinearConfig.from_recipe_name(recipe)
    sizes: Any = FEATURES, OUT, False, None, BF16
    return [Float8Linear(*sizes, config=config) for _ in range(count)]


def an_input(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (ROWS,)), FEATURES, dtype=BF16, requires_grad=True)


def float8_data(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (ROWS, FEATURES))).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("shape", [(96,), (4, 24)])
def test_a_left_operand_is_upcast_once(
    shape: tuple[int, ...], upcasts: list[tuple[int, ...]]
) -> None:
    for recipe in ("tensorwise", "delayed"):  # a gradient, for both GEMMs
        upcasts.clear()
        (layer,) = layers(1, recipe)
        layer(an_input(*shape)).backward(torch.randn(*shape, OUT, dtype=BF16))
        output, grad_input, grad_weight = [(96, 64), (64, 48)], [(96, 48), (48, 64)], [(96, 64)]
        assert upcasts == output + grad_input + grad_weight
    for recipe in ("tensorwise", "rowwise_folded"):  # an input, for the layers that share it
        upcasts.clear()
        x = an_input(*shape)
        outputs = [layer(x) for layer in layers(3, recipe)]
        assert len(outputs) == upcasts.count((64, 48)) == 3
        assert upcasts.count((96, 64)) == 1


def test_nothing_stays_once_the_data_is_gone() -> None:
    (layer,) = layers(1)
    output = layer(an_input())
    assert left_upcasts._entry is not None  # autograd saves the input's data
    output.sum().backward()
    del output
    assert left_upcasts._entry is None
    with torch.no_grad():
        layer(an_input())
    assert left_upcasts._entry is None
    with Watching() as watching:  # nor do operators keep any
        layer(an_input()).sum().backward()
    assert watching.seen.count("fp8_dist.scaled_mm.default") == 3
    assert left_upcasts._entry is None


def test_one_copy_is_kept_while_its_data_has_these_values() -> None:
    cache, data = UpcastCache(), [float8_data() for _ in range(2)]
    first = weakref.ref(cache.upcast(data[0], BF16))
    assert first() is not None
    second = cache.upcast(data[1], BF16)
    assert first() is None
    assert same_bits(cache.upcast(data[1], torch.float64), data[1].to(torch.float64))
    assert cache.upcast(data[1], BF16) is second
    data[1].view(torch.uint8).zero_()
    assert not cache.upcast(data[1], BF16).any()
    assert same_bits(cache.upcast(data[0], BF16), data[0].to(BF16))


def test_a_matrix_is_known_by_all_its_views() -> None:
    cache, data = UpcastCache(), float8_data(4, 24, 64)
    with torch.no_grad():  # as in an autograd function
        copy = cache.upcast(data.view(96, 64), BF16)
        again = cache.upcast(data.reshape(96, 64), BF16)
        transposed = cache.upcast(data.view(96, 64).t(), BF16)
    assert again is copy
    assert transposed.data_ptr() == copy.data_ptr()
    assert same_bits(transposed, data.view(96, 64).t().to(BF16))
    cache, data = UpcastCache(), float8_data(192, 64)
    views = [data, data[:96], data[96:], data.view(64, 192), data.view(64, 192).t(), data[:, :48]]
    for view in views * 2:  # other views of the same memory are other matrices
        assert same_bits(cache.upcast(view, BF16), view.to(BF16))


def test_few_elements_and_inference_tensors_are_not_kept() -> None:
    with torch.inference_mode():
        unversioned = float8_data()
    cache = UpcastCache()
    for data in (float8_data(8, 8), unversioned, float8_data(96, 128)[:, ::2]):
        assert same_bits(cache.upcast(data, BF16), data.to(BF16))
        assert cache._entry is None


def test_what_is_written_without_a_new_version_is_not_kept() -> None:
    # The weight of a layer, a right operand: FSDP2 refills its storage.
    a, b, one = float8_data(), float8_data(64, 64), torch.ones(())
    for fill in (lambda: None, lambda: b.data.view(torch.uint8).zero_()):
        version = b._version
        fill()
        assert b._version == version
        product = kernels.scaled_mm(a, b, one, one, BF16, False, False, False)
        assert left_upcasts._entry is not None
    assert not product.any()
    left_upcasts._entry = None
    # The data of a Float8Tensor.
    x, w = (cast_to_float8(torch.randn(n, 128), CastConfig()) for n in (64, 32))
    for fill in (lambda: None, lambda: x.qdata.data.view(torch.uint8).zero_()):
        fill()
        product = scaled_mm(x, w.t(), out_dtype=BF16)
        assert left_upcasts._entry is None
    assert not product.any()
