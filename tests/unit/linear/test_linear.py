"""Float8Linear on one device: what it refuses and hands on, and its two paths. Numerics: test_recipes."""

import copy
import math
import warnings
from itertools import product

import pytest
import torch
import torch.nn as nn
from gemm_records import record_gemms
from recipe_algebra import step
from reference import Watching, raised, same_bits, sqnr

import fp8_dist.text
from fp8_dist import (
    CastConfig,
    Float8GemmConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingType,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)


def twins(
    config: Float8LinearConfig | None = None,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    sizes: tuple[int, int] = (128, 96),
) -> tuple[nn.Linear, Float8Linear]:
    layer = nn.Linear(*sizes, bias=bias, dtype=dtype)
    return layer, Float8Linear.from_float(copy.deepcopy(layer), config)


def test_a_gather_that_cannot_happen_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_dist.text, "_warned", set())
    model = nn.Sequential(nn.Linear(16, 16))
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    text = "0: enable_fsdp_float8_all_gather=True has no effect on this layer: FSDP2 does not"
    with pytest.warns(UserWarning, match=text):
        model(torch.randn(2, 16)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(2, 16))


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


# Calls through the dispatcher, and direct calls that bypass it.

SHAPES = [(48,), (5, 48), (2, 3, 48), (0, 48)]


def results(layer: Float8Linear, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Output and gradients of a step."""
    layer.zero_grad()
    x.grad = None
    output = layer(x)
    if output.requires_grad:
        output.backward(gradient(output))
    found = [output.detach(), x.grad, *(p.grad for p in layer.parameters())]
    return [None if t is None else t.clone() for t in found]


def gradient(output: torch.Tensor) -> torch.Tensor:
    """A gradient with a different value in each row, expanded to the shape of the output."""
    rows = torch.linspace(-3, 2, output.numel() // output.shape[-1]).to(output)
    return rows.reshape(*output.shape[:-1], 1).expand(output.shape)


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("i", range(len(SHAPES)))
def test_direct_calls_give_the_bits_of_the_operators(i: int) -> None:
    e5m2 = CastConfig(target_dtype=torch.float8_e5m2)
    shape, dtype = SHAPES[i], DTYPES[i]
    for bias, x_learns, weight_learns in product(*[(False, True)] * 3):
        config = Float8LinearConfig(cast_config_weight=e5m2 if bias else CastConfig())
        layer = Float8Linear(48, 33, bias=bias, dtype=dtype, config=config)
        layer.weight.requires_grad_(weight_learns)
        x = (torch.randn(shape) * 4).to(dtype)
        if x_learns and not bias:
            x.view(-1)[:1] = math.inf
        x.requires_grad_(x_learns)
        found = results(layer, x)
        with Watching() as watching:
            expected = results(layer, x)
        gemms = 1 + x_learns + weight_learns
        assert watching.seen.count("fp8_dist.scaled_mm.default") == gemms
        for direct, dispatched in zip(found, expected, strict=True):
            assert (direct is None) == (dispatched is None)
            assert direct is None or dispatched is None or same_bits(direct, dispatched)


@pytest.mark.parametrize("scaling_type", [ScalingType.DYNAMIC, ScalingType.DELAYED])
def test_what_has_outgrown_a_known_scale_saturates(scaling_type: ScalingType) -> None:
    cast = CastConfig(scaling_type=scaling_type, target_dtype=torch.float8_e5m2)
    config = Float8LinearConfig(cast_config_weight=cast)
    layer, x = Float8Linear(16, 16, config=config), torch.randn(4, 16)
    layer(x).sum().backward()
    if scaling_type is ScalingType.DELAYED:
        sync_float8_amax_and_scale_history(layer)
        with torch.no_grad():
            layer.weight.mul_(50)
    else:
        layer.weight.data.mul_(50)  # unnoticed
    assert layer(x).isfinite().all()


def test_an_input_that_was_written_to_is_cast_anew() -> None:
    layers, x = [Float8Linear(16, 16) for _ in range(2)], torch.randn(4, 16)
    outputs = [layers[0](x)]  # autograd keeps the cast
    x.mul_(3)
    outputs.append(layers[1](x))
    assert same_bits(outputs[1], layers[1](x.clone()))
