"""On one device the tensorwise recipe is torchao's: same bits, same results."""

import copy
import importlib.metadata
import importlib.util
import logging

import pytest
import torch
import torch.nn as nn
from reference import same_bits, sqnr

from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    cast_to_float8,
)

logging.getLogger("torchao").setLevel(logging.ERROR)
installed = importlib.util.find_spec("torchao") is not None
pytestmark = pytest.mark.skipif(not installed, reason="torchao is not installed")
if installed:
    from torchao.float8 import Float8LinearConfig as AOConfig
    from torchao.float8.float8_linear import Float8Linear as AOLinear
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig


def test_the_version_compared_with() -> None:
    assert importlib.metadata.version("torchao") == "0.18.0"


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e4])
def test_casts_are_equal_bit_for_bit(
    power_of_2: bool, target: torch.dtype, dtype: torch.dtype, magnitude: float
) -> None:
    x = (torch.randn(64, 96) * magnitude).to(dtype)
    ours = cast_to_float8(x, CastConfig(target_dtype=target), round_scales_to_power_of_2=power_of_2)
    theirs = hp_tensor_to_float8_dynamic(
        x, target, LinearMMConfig(), round_scales_to_power_of_2=power_of_2
    )
    assert same_bits(ours.qdata, theirs._data)
    # Theirs is the multiplier, and is inverted for the GEMM.
    assert same_bits(ours.scale, theirs._scale.reciprocal())


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 100), (torch.bfloat16, 45)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(48, 64), (4, 12, 64)])
def test_outputs_and_gradients_are_equal_up_to_the_order_of_accumulation(
    power_of_2: bool, dtype: torch.dtype, limit: float, bias: bool, shape: tuple[int, ...]
) -> None:
    layer = nn.Linear(64, 80, bias=bias, dtype=dtype)
    layers = {
        "ours": Float8Linear.from_float(
            copy.deepcopy(layer), Float8LinearConfig(round_scales_to_power_of_2=power_of_2)
        ),
        "theirs": AOLinear.from_float(
            copy.deepcopy(layer), AOConfig(round_scales_to_power_of_2=power_of_2)
        ),
    }
    x, grad = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], 80, dtype=dtype)
    found = {}
    for name, float8 in layers.items():
        leaf = x.clone().requires_grad_()
        output = float8(leaf)
        output.backward(grad)
        found[name] = [output, leaf.grad, float8.weight.grad]
    for ours, theirs in zip(found["ours"], found["theirs"], strict=True):
        assert ours.dtype is theirs.dtype
        assert sqnr(theirs, ours) >= limit
