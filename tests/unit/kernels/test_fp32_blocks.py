"""Block scales in fp32, and the bits that inference engines make: codes and scales, all of them."""

import math

import pytest
import torch
from engines import E4M3, FORMS, engine_cast
from reference import same_bits, sqnr
from torch import nn

from fp8_dist import Float8LinearConfig, ScalingGranularity, convert_to_float8_training
from fp8_dist.kernels.blocks import fp32_scales
from fp8_dist.operand.prepare import cast_once
from fp8_dist.scaling import Fp32Blocks, Scheme

BLOCKWISE = ScalingGranularity.BLOCKWISE


def config_of(form: str, source: str = "master") -> Float8LinearConfig:
    scale_format = "ue8m0" if form == "ue8m0" else "fp32"
    return Float8LinearConfig.from_recipe_name(
        "blockwise", scale_format=scale_format, weight_source=source
    )


def many_magnitudes(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * torch.linspace(-9, 4, shape[-1]).exp()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source", ["master", "bf16"])
@pytest.mark.parametrize("shape", [(256, 384), (300, 260), (1, 1), (129, 127)])
def test_weights_have_the_bits_of_the_engine(
    form: str, source: str, shape: tuple[int, int]
) -> None:
    weight, (scheme,) = many_magnitudes(*shape), config_of(form, source).recipe.schemes["weight"]
    made = cast_once(weight, scheme)
    sent = weight.bfloat16() if source == "bf16" else weight
    codes, scales = engine_cast(sent, form, 128, 128)
    assert same_bits(made.qdata, codes)
    assert same_bits(fp32_scales(made.scales[0]), scales)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_have_the_bits_of_the_engine(form: str, dtype: torch.dtype) -> None:
    x, scheme = many_magnitudes(70, 512).to(dtype), config_of(form).recipe.schemes["input"][0]
    made = cast_once(x, scheme)
    codes, scales = engine_cast(x, form)
    assert same_bits(made.qdata, codes)
    assert same_bits(fp32_scales(made.scales[0]), scales)


@pytest.mark.parametrize("form", FORMS)
def test_zeros_stay_zeros(form: str) -> None:
    """For a block below 1e-10, only scales in fp32 are the engine's."""
    weight, (scheme,) = torch.zeros(128, 128), config_of(form).recipe.schemes["weight"]
    made = cast_once(weight, scheme)
    codes, scales = engine_cast(weight, form, 128, 128)
    assert same_bits(made.qdata, codes)
    assert same_bits(fp32_scales(made.scales[0]), scales) == (form != "ue8m0")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_reaches_its_block_alone(value: float) -> None:
    x = torch.randn(4, 256)
    x[1, 3] = value
    made = cast_once(x, Fp32Blocks(E4M3, 1, 128))
    wide = made.scheme.dequantize(made.qdata, made.scales)
    assert not wide[1, 3].isfinite()
    assert not made.scales[0][1, 0].isfinite()
    wide[1, :128] = 0
    assert wide.isfinite().all()


def test_rows_are_blocked_again_for_their_second_gemm() -> None:
    scheme = Fp32Blocks(E4M3, 1, 32)
    x = torch.randn(70, 64) * torch.randn(70, 1).exp()
    made = cast_once(x, scheme)
    again = scheme.for_rows(made, None)
    first, second = (q.scheme.dequantize(q.qdata, q.scales, q.start) for q in (made, again))
    assert again.scales[0].shape == (3, 64)
    codes, scales = engine_cast(first.t(), "vllm", 1, 32)
    assert same_bits(again.qdata.contiguous(), codes.t().contiguous())
    assert same_bits(again.scales[0].contiguous(), scales.t().contiguous())
    assert sqnr(first, second) > 28


RECIPES = {
    **{form: config_of(form) for form in FORMS},
    **{
        name: Float8LinearConfig.from_recipe_name(name)
        for name in ("mxfp8", "rowwise", "rowwise_folded")
    },
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("operand", ["input", "grad_output"])
def test_a_row_alone_is_cast_as_in_a_batch(name: str, operand: str) -> None:
    scheme: Scheme = RECIPES[name].recipe.schemes[operand][0]
    batch = many_magnitudes(33, 256).bfloat16()
    whole = cast_once(batch, scheme)
    for row in (0, 17, 32):
        alone = cast_once(batch[row : row + 1], scheme)
        assert same_bits(alone.qdata, whole.qdata[row : row + 1])
        assert same_bits(alone.scales[0], whole.scales[0][row : row + 1])


@pytest.mark.parametrize("name", RECIPES)
def test_a_row_alone_is_multiplied_as_in_a_batch(name: str) -> None:
    layer = nn.Sequential(nn.Linear(256, 192, bias=False)).bfloat16()
    convert_to_float8_training(layer, config=RECIPES[name])
    batch = many_magnitudes(33, 256).bfloat16().requires_grad_()
    grad = torch.randn(33, 192).bfloat16()
    y = layer(batch)
    y.backward(grad)
    for row in (0, 17, 32):
        alone = batch[row : row + 1].detach().requires_grad_()
        output = layer(alone)
        output.backward(grad[row : row + 1])
        assert same_bits(output, y[row : row + 1])
        assert alone.grad is not None
        assert batch.grad is not None
        assert same_bits(alone.grad, batch.grad[row : row + 1])


def test_an_empty_tensor_has_no_scales() -> None:
    made = cast_once(torch.empty(0, 256), Fp32Blocks(E4M3, 1, 128))
    assert made.qdata.shape == (0, 256)
    assert made.scales[0].shape == (0, 2)
