"""On one device torchao's recipes are torchao's: same bits, same results."""

import dataclasses
import importlib.metadata
import importlib.util
import logging
import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn as nn
from recipe_algebra import GEMMS, config_of, layer_of, operands, step
from reference import Product, float8_gemms, same_bits, sqnr
from torch_releases import rows_in_torchs_gemm

from fp8_dist import (
    CastConfig,
    Float8Tensor,
    ScalingGranularity,
    cast_to_float8,
)

logging.getLogger("torchao").setLevel(logging.ERROR)
installed = importlib.util.find_spec("torchao") is not None
pytestmark = pytest.mark.skipif(not installed, reason="torchao is not installed")
if installed:
    import torchao.float8.float8_ops
    from torchao.float8 import Float8LinearConfig as AOConfig
    from torchao.float8.config import ScalingGranularity as AOGranularity
    from torchao.float8.float8_linear import Float8Linear as AOLinear
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig


def test_the_version_compared_with() -> None:
    assert importlib.metadata.version("torchao") == "0.18.0"


@pytest.mark.parametrize("dim", [None, -1, 0])
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e5m2, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float16),
    ],
)
def test_casts_are_equal_bit_for_bit(
    dim: int | None, power_of_2: bool, target: torch.dtype, dtype: torch.dtype
) -> None:
    granularity = "TENSORWISE" if dim is None else "AXISWISE"
    config = CastConfig(scaling_granularity=ScalingGranularity[granularity], target_dtype=target)
    for shape, factor in product([(64, 96), (3, 5, 7), (1, 9), (9, 1)], (1e-6, 1.0, 1e4)):
        x = torch.randn(shape) * factor
        if dim is not None:
            x = x * torch.logspace(-14, 4, shape[-1])
            x[0] = 0
        x = x.to(dtype)
        ours = cast_to_float8(x, config, dim=dim, round_scales_to_power_of_2=power_of_2)
        theirs = hp_tensor_to_float8_dynamic(
            x,
            target,
            LinearMMConfig(),
            scaling_granularity=AOGranularity[granularity],
            axiswise_dim=dim,
            round_scales_to_power_of_2=power_of_2,
        )
        assert same_bits(ours.qdata, theirs._data)
        # Theirs is the multiplier, and is inverted for the GEMM.
        assert same_bits(ours.scale, theirs._scale.reciprocal())


Step = tuple[dict[str, torch.Tensor], list[Product]]


def both(
    recipe: str, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, **changes: Any
) -> tuple[Step, Step]:
    """A step of our layer and of torchao's, and what they multiply in float8."""
    theirs: list[Product] = []
    their_gemm = torchao.float8.float8_ops.addmm_float8_unwrapped

    def their_recording(a, scale_a, b, scale_b, *args, **kwargs):  # type: ignore[no-untyped-def]
        # Their scale is the multiplier.
        pair = ((a, scale_a.reciprocal()), (b, scale_b.reciprocal()))
        theirs.append(tuple(Float8Tensor(*each, torch.float32) for each in pair))
        return their_gemm(a, scale_a, b, scale_b, *args, **kwargs)

    their_config = dataclasses.replace(AOConfig.from_recipe_name(recipe), **changes)
    linear = nn.Linear(w.shape[1], w.shape[0], bias=False)
    linear.weight = nn.Parameter(w.clone())
    with float8_gemms() as ours, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchao.float8.float8_ops, "addmm_float8_unwrapped", their_recording)
        found = step(layer_of(config_of(recipe, **changes), w), x, g)
        expected = step(AOLinear.from_float(linear, their_config), x, g)
    return (found, ours), (expected, theirs)


def same_operand(ours: Float8Tensor, theirs: Float8Tensor) -> bool:
    # (Beside rows torchao repeats the one scale of a tensor, as its kernel wants it.)
    scale = ours.scale.expand(theirs.scale.shape)
    return same_bits(ours.qdata, theirs.qdata) and same_bits(scale, theirs.scale)


recipes = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])


# Every pair of a shape, a dtype, and whether scales are powers of two.
@pytest.mark.parametrize(
    ("shape", "dtype", "power_of_2"),
    [
        ((48, 64), torch.float32, False),
        ((48, 64), torch.bfloat16, True),
        ((4, 12, 64), torch.float32, True),
        ((2, 3, 8, 64), torch.bfloat16, False),
        ((64,), torch.float32, False),
    ],
)
@recipes
def test_recipes_multiply_the_same_operands(
    recipe: str, shape: tuple[int, ...], dtype: torch.dtype, power_of_2: bool
) -> None:
    x, w, g = (t.to(dtype) for t in operands(math.prod(shape[:-1]), 64, 80, outliers=True))
    w[3] = 0
    x, g = x.view(shape), g.view(*shape[:-1], 80)
    with rows_in_torchs_gemm(recipe):
        (found, ours), (expected, theirs) = both(
            recipe, x, w, g, round_scales_to_power_of_2=power_of_2
        )
        assert len(ours) == len(theirs) == (2 if recipe == "rowwise_with_gw_hp" else 3)
        for our_pair, their_pair in zip(ours, theirs, strict=True):
            assert all(same_operand(*each) for each in zip(our_pair, their_pair, strict=True))
        for gemm in GEMMS:
            assert found[gemm].dtype is expected[gemm].dtype
            assert found[gemm].shape == expected[gemm].shape
            # It multiplies rows in bf16.
            exact = recipe == "tensorwise" and dtype is torch.float32
            assert sqnr(expected[gemm], found[gemm]) >= (100 if exact else 45), gemm


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_fp32_results_are_closer_to_the_products_than_torchaos(recipe: str) -> None:
    # It multiplies rows in bf16.
    with rows_in_torchs_gemm(recipe):
        (found, ours), (expected, _) = both(recipe, *operands(outliers=True))
        for gemm, (a, b) in zip(GEMMS, ours, strict=False):
            product = (a.qdata.double() * a.scale) @ (b.qdata.double() * b.scale)
            assert sqnr(product, found[gemm]) > 120
            assert 45 < sqnr(product, expected[gemm]) < 70
