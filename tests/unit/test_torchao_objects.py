"""The library refuses objects of torchao by name, and says what to pass instead."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from reference import all_warnings, raised
from torch import nn
from torchao import float8 as torchao
from torchao.float8.config import Float8GemmConfig, Float8LinearRecipeName, ScalingGranularity
from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel as TorchaoColwise
from torchao.float8.float8_tensor_parallel import Float8RowwiseParallel as TorchaoRowwise
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

import fp8_dist
from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    attach_update,
    auto_filter,
    convert_to_float8_training,
    convert_to_linear,
    freeze_to_float8,
    precompute_float8_dynamic_scale,
    skip_head,
)
from fp8_dist.moe import convert_experts_to_float8_training
from fp8_dist.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel
from fp8_dist.tensor_parallel.plan import _offenders


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64)).bfloat16()


def test_configs() -> None:
    config, cast = torchao.Float8LinearConfig(), torchao.CastConfig()
    theirs: list[tuple[Callable[[], Any], str]] = [
        (lambda: convert_to_float8_training(plain(), config=config), "Float8LinearConfig"),
        (lambda: Float8Linear(32, 32, config=config), "Float8LinearConfig"),
        (lambda: Float8Linear.from_float(nn.Linear(32, 32), config), "Float8LinearConfig"),
        (lambda: Float8LinearConfig(cast_config_weight=cast), "CastConfig"),
        (lambda: Float8LinearConfig(gemm_config_output=Float8GemmConfig()), "Float8GemmConfig"),
        (lambda: CastConfig(torchao.ScalingType.DYNAMIC), "ScalingType"),
        (
            lambda: CastConfig(scaling_granularity=ScalingGranularity.AXISWISE),
            "ScalingGranularity",
        ),
        (lambda: fp8_dist.cast_to_float8(torch.ones(16, 16), cast), "CastConfig"),
    ]
    for call, name in theirs:
        assert f"got torchao's {name}; import {name} from fp8_dist" in raised(TypeError, call)
        assert hasattr(fp8_dist, name)
    text = raised(TypeError, lambda: convert_experts_to_float8_training(plain(), config=config))
    assert "must be a Float8ExpertsConfig, got torchao's Float8LinearConfig; Float8Exp" in text


def test_names_of_recipes_are_taken() -> None:
    for recipe in Float8LinearRecipeName:
        found = Float8LinearConfig.from_recipe_name(recipe)
        assert found == Float8LinearConfig.from_recipe_name(recipe.value)
        assert auto_filter(recipe)(nn.Linear(8192, 8192, device="meta"), "up")


def test_a_model_that_torchao_has_converted() -> None:
    model = torchao.convert_to_float8_training(plain())
    reason = "torchao has converted it: convert the plain model"
    text = raised(ValueError, lambda: convert_to_float8_training(model))
    assert text.splitlines()[1:] == [f"  * (2): {reason}"]
    optimizer = torch.optim.SGD(model.parameters())
    for call in (
        lambda: precompute_float8_dynamic_scale(model),
        lambda: attach_update(optimizer, model),
    ):
        assert "call convert_to_float8_training of fp8_dist first" in raised(ValueError, call)
    text = raised(ValueError, lambda: Float8Linear.from_float(model[0]))
    assert text == f"Float8Linear.from_float: the layer can't be converted: {reason}"
    partly = plain()
    partly[0] = model[0]
    with all_warnings() as texts:
        convert_to_float8_training(partly)
    assert reason in texts[0]


@pytest.mark.parametrize("quantize", [Float8WeightOnlyConfig, Int8WeightOnlyConfig])
def test_quantized_weights(quantize: Any) -> None:
    model = plain()
    quantize_(model, quantize())
    way = "which implements its own matmul (dequantize it first)"
    assert way in raised(ValueError, lambda: convert_to_float8_training(model))
    assert way in raised(TypeError, lambda: Float8Linear.from_float(model[0]))
    float8, state = convert_to_float8_training(plain()), model.state_dict()
    for assign in (False, True):
        text = raised(RuntimeError, partial(float8.load_state_dict, state, assign=assign))
        assert text.count(f"{way}; load a state dict of these values") == 2
    values = {k: v.dequantize() if k.endswith("weight") else v for k, v in state.items()}
    float8.load_state_dict(values)
    model[0].weight = nn.Parameter(model[0].weight.dequantize())
    with all_warnings():
        assert isinstance(convert_to_float8_training(model)[0], Float8Linear)


def test_a_converted_layer_refuses_a_quantized_weight() -> None:
    model = convert_to_float8_training(plain())
    with pytest.raises(
        TypeError, match="0: the weight of a float8 layer can't be torchao's Float8Tensor, w"
    ):
        quantize_(model, Float8WeightOnlyConfig())
    quantize_(convert_to_linear(model), Float8WeightOnlyConfig())
    model(torch.randn(5, 64, dtype=torch.bfloat16))


def test_a_weight_that_is_stored_in_float8_is_unfrozen_first() -> None:
    config = Float8LinearConfig.from_recipe_name("blockwise")
    model = convert_to_float8_training(plain(), config=config).requires_grad_(False)
    freeze_to_float8(model)
    with pytest.raises(NotImplementedError, match=r"or call fp8_dist\.unfreeze_from_float8"):
        quantize_(model, Float8WeightOnlyConfig())


def test_styles() -> None:
    theirs, ours = torchao.convert_to_float8_training(plain()), convert_to_float8_training(plain())
    for style in (Float8ColwiseParallel(), Float8RowwiseParallel()):
        (text,) = style.misfits(theirs[0], 1)
        assert (
            "needs a Float8Linear, found torchao's Float8Linear; convert the plain model (" in text
        )
    plan = {"0": TorchaoColwise(), "2": TorchaoRowwise()}
    found = [*_offenders(ours, 1, plan)]
    assert found == [
        f"{name!r}: {style} is torchao's, and is for layers that torchao has converted: import "
        f"{style} from fp8_dist.tensor_parallel"
        for name, style in (("0", "Float8ColwiseParallel"), ("2", "Float8RowwiseParallel"))
    ]
    assert not [*_offenders(theirs, 1, plan)]


def test_filters_that_are_not_called() -> None:
    for convert in (convert_to_float8_training, convert_experts_to_float8_training):
        text = raised(TypeError, partial(convert, plain(), module_filter_fn=skip_head))
        assert "got <function skip_head at" in text
        assert "skip_head(model) makes one" in text
    text = raised(
        TypeError, lambda: convert_to_float8_training(plain(), module_filter_fn=auto_filter)
    )
    assert text.endswith("module_filter_fn=auto_filter(recipe)")
