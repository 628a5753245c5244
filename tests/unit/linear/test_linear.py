"""Float8Linear on one device: what it saves, refuses and hands on. Its numerics: test_recipes."""

import copy
import warnings

import pytest
import torch
import torch.nn as nn
from recipe_algebra import step
from reference import raised, same_bits, sqnr

import fp8_dist.warn
from fp8_dist import (
    Float8GemmConfig,
    Float8Linear,
    Float8LinearConfig,
    convert_to_float8_training,
    update_float8_scales,
)
from fp8_dist.fsdp import Float8AllGatherWeight
from fp8_dist.linear.recording import record_gemms


def twins(
    config: Float8LinearConfig | None = None,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    sizes: tuple[int, int] = (128, 96),
) -> tuple[nn.Linear, Float8Linear]:
    layer = nn.Linear(*sizes, bias=bias, dtype=dtype)
    return layer, Float8Linear.from_float(copy.deepcopy(layer), config)


def test_a_gather_that_cannot_happen_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_dist.warn, "_warned", set())
    model = nn.Sequential(nn.Linear(16, 16))
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    text = "0: enable_fsdp_float8_all_gather=True has no effect on this layer: FSDP2 does not"
    with pytest.warns(UserWarning, match=text):
        model(torch.randn(2, 16)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(2, 16))


def test_auto_says_nothing_of_a_model_without_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_dist.warn, "_warned", set())
    config = Float8LinearConfig(enable_fsdp_float8_all_gather="auto")
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=config)
    assert isinstance(model[0].weight, Float8AllGatherWeight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update_float8_scales(model)
        model(torch.randn(2, 16)).sum().backward()
    assert model[0].weight.grad is not None


def test_inputs_that_are_refused() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
    text = raised(TypeError, lambda: model(torch.ones(2, 16, dtype=torch.int64)))
    assert text == "0: the input must be floating point, got torch.int64"
    for shape in ((2, 15), ()):
        text = raised(ValueError, lambda shape=shape: model(torch.ones(shape)))
        assert text.startswith("0: the last dim of the input must be in_features=16, got")


def test_outputs_may_be_modified_in_place() -> None:
    for bias in (False, True):
        layer, float8 = twins(bias=bias)
        x = torch.randn(2, 8, 128)
        for model in (layer, float8):
            nn.Sequential(model, nn.ReLU(inplace=True))(x).sum().backward()
        assert sqnr(layer.weight.grad, float8.weight.grad) > 15


def test_the_constructor_takes_the_arguments_of_linear() -> None:
    config = Float8LinearConfig(round_scales_to_power_of_2=True)
    layer = Float8Linear(16, 32, False, dtype=torch.bfloat16, config=config)
    assert layer(torch.randn(2, 16, dtype=torch.bfloat16)).shape == (2, 32)
    assert (layer.bias, layer.config) == (None, config)


def test_scales_whose_product_exceeds_fp32() -> None:
    x, w = torch.full((2, 16), 1e30), torch.full((16, 16), 1e30)
    w[1:] = 0
    layer = Float8Linear(16, 16, bias=False, dtype=torch.bfloat16)
    layer.weight.data.copy_(w)
    output = layer(x.bfloat16())
    assert output[:, 0].isinf().all()
    assert torch.equal(output[:, 1:], torch.zeros(2, 15, dtype=torch.bfloat16))


@pytest.mark.parametrize("flag", ["pad_inner_dim", "emulate"])
def test_every_flag_reaches_the_three_gemms(flag: str) -> None:
    fast = Float8GemmConfig(use_fast_accum=True)
    for value in (False, True):
        config = Float8LinearConfig(**{flag: value}, gemm_config_grad_input=fast)
        with record_gemms() as records:
            step(twins(config)[1], torch.randn(16, 128), torch.randn(16, 96))
        # The rows of grad_weight's operands are padded in any case.
        expected = [value, value, value or flag == "pad_inner_dim"]
        place = 1 if flag == "pad_inner_dim" else 2
        assert [record.options[place] for record in records] == expected
        assert [record.options[0] for record in records] == [True, True, False]


def test_a_layer_follows_another_config() -> None:
    _, layer = twins(bias=False)
    other = Float8LinearConfig.from_recipe_name("rowwise")
    _, expected = twins(other, bias=False)
    expected.load_state_dict(layer.state_dict())
    layer.config = other
    x = torch.randn(16, 128)
    assert same_bits(layer(x), expected(x))


def test_the_bias_is_not_differentiated_twice_either() -> None:
    _, float8 = twins()
    loss = float8(torch.randn(4, 128)).square().sum()
    (gradient,) = torch.autograd.grad(loss, float8.bias, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        gradient.sum().backward()
