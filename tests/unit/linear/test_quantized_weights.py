"""Quantized weights of torchao: converted layers refuse them, and the conversion leaves them out."""

import pytest
import torch
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, quantize_

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    convert_to_float8_training,
    convert_to_linear,
    freeze_to_float8,
)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64)).bfloat16()


def test_a_converted_layer_refuses_a_quantized_weight() -> None:
    model = convert_to_float8_training(plain())
    with pytest.raises(
        TypeError, match="0: the weight of a float8 layer can't be a Float8Tensor, w"
    ):
        quantize_(model, Float8WeightOnlyConfig())
    quantize_(convert_to_linear(model), Float8WeightOnlyConfig())
    model(torch.randn(5, 64, dtype=torch.bfloat16))


def test_quantized_weights_are_not_converted() -> None:
    model = plain()
    quantize_(model, Float8WeightOnlyConfig())
    with pytest.raises(ValueError, match=r"\* \(2\): its weight is a Float8Tensor, which im"):
        convert_to_float8_training(model)
    with pytest.raises(TypeError, match="weight of the layer is a Float8Tensor, which implements"):
        Float8Linear.from_float(model[0])


def test_a_weight_that_is_stored_in_float8_is_unfrozen_first() -> None:
    config = Float8LinearConfig.from_recipe_name("blockwise")
    model = convert_to_float8_training(plain(), config=config).requires_grad_(False)
    freeze_to_float8(model)
    with pytest.raises(NotImplementedError, match=r"or call fp8_dist\.unfreeze_from_float8"):
        quantize_(model, Float8WeightOnlyConfig())
