"""A converted layer whose weight torchao quantizes computes as an nn.Linear would with it."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from reference import same_bits
from torch import nn
from torchao.quantization import (
    Float8Tensor,
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)

import fp8_dist.text
from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    attach_update,
    conversion_summary,
    convert_to_float8_training,
    freeze_to_float8,
    precompute_float8_dynamic_scale,
    unfreeze_from_float8,
)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64)).bfloat16()


def converted(recipe: str = "tensorwise") -> nn.Sequential:
    config = Float8LinearConfig.from_recipe_name(recipe)
    model = convert_to_float8_training(plain(), config=config)
    assert isinstance(model, nn.Sequential)
    return model


def quantized(model: nn.Sequential, config: object = None) -> nn.Sequential:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "0: the weight was replaced")
        quantize_(model, config or Float8WeightOnlyConfig())
    return model


CONFIGS: list[Callable[[], object]] = [
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("gather", [False, True])
def test_results_are_those_of_nn_linear(config: Callable[[], object], gather: bool) -> None:
    model = convert_to_float8_training(
        plain(), config=Float8LinearConfig(enable_fsdp_float8_all_gather=gather)
    )
    assert isinstance(model, nn.Sequential)
    model(torch.randn(3, 64, dtype=torch.bfloat16)).sum().backward()
    results = []
    for each in (model, plain()):
        x = torch.randn(5, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
        output = quantized(each, config())(x.requires_grad_())
        output.float().square().sum().backward()
        results.append((output.detach(), x.grad))
    (output, grad), (expected, expected_grad) = results
    assert same_bits(output, expected)
    # (torchao's dynamic int8 has no gradient for its input, with nn.Linear neither.)
    assert (grad is None) == (expected_grad is None)
    assert grad is None or same_bits(grad, expected_grad)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_a_quantized_model_is_as_if_never_converted(recipe: str) -> None:
    model = converted(recipe)
    model(torch.randn(3, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach_update(optimizer, model)
    quantized(model)
    assert type(model[0]) is nn.Linear
    assert set(vars(model[0])) - {"extra_repr"} == set(vars(nn.Linear(1, 1)))
    assert isinstance(model[0].weight, Float8Tensor)
    assert str(model[0]).startswith("Linear(in_features=64, out_features=32, bias=True, weight=")
    optimizer.step()  # the attached update has nothing to do
    assert [row.converted for row in conversion_summary(model).rows] == [False, False]
    reason = conversion_summary(model).rows[0].reason
    assert reason == "its weight is a Float8Tensor, which multiplies in a way of its own"

    x = torch.randn(5, 64, dtype=torch.bfloat16)
    state = copy.deepcopy(model.state_dict())
    loaded = converted(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded.load_state_dict(state, assign=True)
    for other in (loaded, copy.deepcopy(model)):
        assert same_bits(other(x).detach(), model(x).detach())


def test_the_layers_that_are_not_quantized_stay_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_dist.text, "_warned", set())
    model = converted()
    with pytest.warns(
        UserWarning, match=r"0: the weight was replaced by a torchao\.\S+\.Float8Tensor, which"
    ):
        quantize_(model, Float8WeightOnlyConfig(), filter_fn=lambda m, fqn: fqn == "0")
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, Float8Linear]
    precompute_float8_dynamic_scale(model)
    assert model[2].float8_weight.cache.known is not None
    model(torch.randn(5, 64, dtype=torch.bfloat16)).sum().backward()
    assert model[2].weight.grad is not None
    assert [row.converted for row in conversion_summary(model).rows] == [False, True]


def test_quantized_weights_are_not_converted() -> None:
    model = quantized(plain())
    with pytest.raises(ValueError, match="0: its weight is a Float8Tensor, which multiplies in a"):
        convert_to_float8_training(model)
    with pytest.raises(TypeError, match="has a weight of the type Float8Tensor, which multiplies"):
        Float8Linear.from_float(model[0])


@pytest.mark.parametrize("config", CONFIGS)
def test_a_weight_that_is_stored_in_float8_is_unfrozen_first(config: Callable[[], object]) -> None:
    model = converted("blockwise").requires_grad_(False)
    freeze_to_float8(model)
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    expected = model(x)
    with pytest.raises(NotImplementedError, match=r"or call fp8_dist\.unfreeze_from_float8"):
        quantized(model, config())
    assert same_bits(model(x), expected)
    unfreeze_from_float8(model)
    linear = plain()
    linear.load_state_dict(model.state_dict())
    assert same_bits(quantized(model, config())(x), quantized(linear, config())(x))
