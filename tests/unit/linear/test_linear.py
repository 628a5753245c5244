"""Float8Linear on one device: accuracy, gradients, dtypes, what it saves, how it compiles."""

import copy
import warnings

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from reference import raised, same_bits, sqnr, weights_used

import fp8_dist.warn
from fp8_dist import (
    CastConfig,
    Float8GemmConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingType,
    cast_to_float8,
    convert_to_float8_training,
    update_float8_scales,
)
from fp8_dist.fsdp import Float8AllGatherWeight
from fp8_dist.kernels import amax
from fp8_dist.linear.recording import record_gemms

OFF = CastConfig(ScalingType.DISABLED)
HIGH = Float8LinearConfig(
    cast_config_input=OFF, cast_config_weight=OFF, cast_config_grad_output=OFF
)


def twins(
    config: Float8LinearConfig | None = None,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    sizes: tuple[int, int] = (128, 96),
) -> tuple[nn.Linear, Float8Linear]:
    layer = nn.Linear(*sizes, bias=bias, dtype=dtype)
    return layer, Float8Linear.from_float(copy.deepcopy(layer), config)


def run(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    output.backward(grad)
    named = {f"grad_{n}": p.grad for n, p in layer.named_parameters()}
    return {"output": output.detach(), "grad_input": x.grad, **named}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sqnr_against_the_high_precision_layer(dtype: torch.dtype) -> None:
    layer, float8 = twins(dtype=dtype, sizes=(512, 256))
    x, grad = torch.randn(384, 512, dtype=dtype), torch.randn(384, 256, dtype=dtype)
    expected = run(layer.float(), x.float(), grad.float())
    actual = run(float8, x, grad)
    assert sqnr(expected["output"], actual["output"]) >= 24
    assert sqnr(expected["grad_input"], actual["grad_input"]) >= 20
    assert sqnr(expected["grad_weight"], actual["grad_weight"]) >= 20
    assert {t.dtype for t in actual.values()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bias_gradient_is_the_high_precision_one(dtype: torch.dtype) -> None:
    layer, float8 = twins(dtype=dtype)
    x, grad = torch.randn(4, 16, 128, dtype=dtype), torch.randn(4, 16, 96, dtype=dtype)
    assert same_bits(run(layer, x, grad)["grad_bias"], run(float8, x, grad)["grad_bias"])


def test_the_three_gemms_multiply_the_cast_operands() -> None:
    _, float8 = twins(bias=False)
    x, grad = torch.randn(32, 128), torch.randn(32, 96)
    actual = run(float8, x, grad)
    xq = cast_to_float8(x, CastConfig()).dequantize().double()
    wq = cast_to_float8(float8.weight.detach(), CastConfig()).dequantize().double()
    gq = cast_to_float8(grad, CastConfig(target_dtype=torch.float8_e5m2)).dequantize().double()
    assert sqnr(xq @ wq.t(), actual["output"]) > 120
    assert sqnr(gq @ wq, actual["grad_input"]) > 120
    assert sqnr(gq.t() @ xq, actual["grad_weight"]) > 120


@pytest.mark.parametrize(
    "shape", [(128,), (5, 128), (2, 3, 128), (2, 3, 2, 128), (0, 128), (1, 0, 128)]
)
def test_inputs_of_any_number_of_dims(shape: tuple[int, ...]) -> None:
    layer, float8 = twins()
    x, grad = torch.randn(shape), torch.randn(*shape[:-1], 96)
    expected, actual = run(layer, x, grad), run(float8, x, grad)
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape
        assert actual[name].isfinite().all()
        assert tensor.numel() == 0 or sqnr(tensor, actual[name]) > 18


def test_non_contiguous_inputs_and_gradients() -> None:
    _, float8 = twins()
    x, grad = torch.randn(8, 6, 128), torch.randn(8, 6, 96)
    expected = run(float8, x, grad)
    actual = run(float8, x.transpose(0, 1).contiguous().transpose(0, 1), grad.expand(8, 6, 96))
    for name, tensor in expected.items():
        assert same_bits(tensor, actual[name])
    summed = run(float8, x, torch.ones(()).expand(8, 6, 96))
    assert sqnr(torch.full((96,), 48.0), summed["grad_bias"]) > 120


def test_all_gemms_disabled_is_nn_linear() -> None:
    layer, float8 = twins(HIGH)
    x, grad = torch.randn(16, 128), torch.randn(16, 96)
    expected, actual = run(layer, x, grad), run(float8, x, grad)
    for name in expected:
        assert sqnr(expected[name], actual[name]) > 130


@pytest.mark.parametrize("gemm", ["output", "grad_input", "grad_weight"])
def test_each_gemm_can_be_disabled_alone(gemm: str) -> None:
    on = CastConfig()
    config = {
        "output": Float8LinearConfig(
            cast_config_input=OFF,
            cast_config_weight=OFF,
            cast_config_input_for_grad_weight=on,
            cast_config_weight_for_grad_input=on,
        ),
        "grad_input": Float8LinearConfig(
            cast_config_grad_output=OFF,
            cast_config_weight_for_grad_input=OFF,
            cast_config_grad_output_for_grad_weight=on,
        ),
        "grad_weight": Float8LinearConfig(
            cast_config_input_for_grad_weight=OFF, cast_config_grad_output_for_grad_weight=OFF
        ),
    }[gemm]
    layer, float8 = twins(config)
    x, grad = torch.randn(64, 128), torch.randn(64, 96)
    expected, actual = run(layer, x, grad), run(float8, x, grad)
    for name in ("output", "grad_input", "grad_weight"):
        noise = sqnr(expected[name], actual[name])
        assert noise > 130 if name == gemm else 18 < noise < 40, name


def test_only_the_gradients_that_are_needed() -> None:
    _, float8 = twins()
    float8.weight.requires_grad_(False)
    x = torch.randn(4, 128, requires_grad=True)
    float8(x).sum().backward()
    assert float8.weight.grad is None
    assert x.grad is not None
    float8.weight.requires_grad_(True)
    float8.bias.grad = None
    float8(x.detach()).sum().backward()
    assert float8.weight.grad is not None
    with torch.no_grad():
        assert not float8(x).requires_grad
    with torch.inference_mode():
        assert float8(x).is_inference()


@pytest.mark.parametrize("config", [Float8LinearConfig(), HIGH], ids=["float8", "disabled"])
def test_autocast_gives_its_dtype_and_leaves_the_master_weight_its_cast(
    config: Float8LinearConfig,
) -> None:
    _, float8 = twins(config)
    x = torch.randn(8, 128)
    with torch.autocast("cpu", torch.bfloat16), weights_used(float8) as used:
        output = float8(x)
    assert output.dtype is torch.bfloat16
    output.sum().backward()
    assert float8.weight.grad.dtype is torch.float32
    if used:
        assert same_bits(used[""].qdata, cast_to_float8(float8.weight, CastConfig()).qdata)
    assert same_bits(output, float8(x.bfloat16()))


def test_saves_float8_operands_for_backward() -> None:
    _, float8 = twins(bias=False)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(32, 128, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        float8(x)
    table = "\n".join(f"{str(t.dtype)[6:]} {tuple(t.shape)} {t.nbytes} B" for t in saved)
    assert_expected_inline(
        table,
        """\
float8_e4m3fn (32, 128) 4096 B
float32 () 4 B
float8_e4m3fn (96, 128) 12288 B
float32 () 4 B""",
    )


@pytest.mark.parametrize("power_of_2", [False, True])
def test_power_of_two_scales_reach_every_cast(power_of_2: bool) -> None:
    config = Float8LinearConfig(round_scales_to_power_of_2=power_of_2)
    _, float8 = twins(config)
    with weights_used(float8) as used:
        run(float8, torch.randn(16, 128), torch.randn(16, 96))
    fraction = torch.frexp(used[""].scale).mantissa.item()
    assert (fraction == 0.5) is power_of_2


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiles_without_graph_breaks_to_the_same_bits(backend: str) -> None:
    _, float8 = twins()
    x, grad = torch.randn(4, 16, 128), torch.randn(4, 16, 96)
    expected = run(float8, x, grad)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(float8), backend=backend, fullgraph=True)
    for name, tensor in run(compiled, x, grad).items():
        name = name.replace("_orig_mod.", "")
        if name == "grad_bias" and backend == "inductor":  # a sum: its order is the compiler's
            assert sqnr(expected[name], tensor) > 120
        else:
            assert same_bits(tensor, expected[name]), name


def test_a_gather_that_cannot_happen_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_dist.warn, "_warned", set())
    model = nn.Sequential(nn.Linear(16, 16))
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    with pytest.warns(UserWarning, match="no effect") as record:
        model(torch.randn(2, 16)).sum().backward()
    assert_expected_inline(
        str(record[0].message),
        """0: enable_fsdp_float8_all_gather=True has no effect on this layer: FSDP2 does not manage its weight. Call fully_shard on the model (after convert_to_float8_training), or leave the flag off""",
    )
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


def test_a_non_finite_input_is_visible() -> None:
    _, float8 = twins()
    x, grad = torch.randn(8, 128), torch.randn(8, 96)
    x[2, 3] = torch.inf
    result = run(float8, x, grad)
    assert result["output"].isnan().all()
    assert result["grad_weight"].isnan().all()
    assert result["grad_input"].isfinite().all()
    assert amax(x).isinf()


def test_inputs_that_are_no_floats_are_refused() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
    assert_expected_inline(
        raised(TypeError, lambda: model(torch.ones(2, 16, dtype=torch.int64))),
        """0: the input must be floating point, got torch.int64""",
    )


def test_inputs_of_another_width_are_refused() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
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


def test_the_constructor_takes_those_of_linear() -> None:
    config = Float8LinearConfig(round_scales_to_power_of_2=True)
    layer = Float8Linear(16, 32, False, dtype=torch.bfloat16, config=config)
    assert layer(torch.randn(2, 16, dtype=torch.bfloat16)).shape == (2, 32)
    assert "round_scales_to_power_of_2=True" in repr(layer)


def test_scales_whose_product_exceeds_fp32() -> None:
    x, w = torch.full((2, 16), 1e30), torch.full((16, 16), 1e30)
    w[1:] = 0
    layer = Float8Linear(16, 16, bias=False, dtype=torch.bfloat16)
    layer.weight.data.copy_(w)
    output = layer(x.bfloat16())
    assert output[:, 0].isinf().all()
    assert torch.equal(output[:, 1:], torch.zeros(2, 15, dtype=torch.bfloat16))


def test_a_second_backward_is_refused() -> None:
    _, float8 = twins()
    x = torch.randn(4, 128, requires_grad=True)
    (gradient,) = torch.autograd.grad(float8(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("flag", ["pad_inner_dim", "emulate"])
def test_every_flag_reaches_the_three_gemms(flag: str) -> None:
    fast = Float8GemmConfig(use_fast_accum=True)
    for value in (False, True):
        config = Float8LinearConfig(**{flag: value}, gemm_config_grad_input=fast)
        with record_gemms() as records:
            run(twins(config)[1], torch.randn(16, 128), torch.randn(16, 96))
        # The rows of grad_weight's operands are padded in any case.
        expected = [value, value, value or flag == "pad_inner_dim"]
        place = 1 if flag == "pad_inner_dim" else 2
        assert [record.options[place] for record in records] == expected
        assert [record.options[0] for record in records] == [True, True, False]
