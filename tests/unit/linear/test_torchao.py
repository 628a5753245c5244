"""On one device, the recipes that torchao has too give torchao's bits and results."""

import dataclasses
import importlib.metadata
import math
from typing import Any

import pytest
import torch
import torch.nn as nn
import torchao.float8.float8_ops
from recipe_algebra import GEMMS, config_of, layer_of, operands, step
from reference import Product, float8_gemms, same_bits, sqnr
from torch_releases import rows_in_torchs_gemm
from torchao.float8 import Float8LinearConfig as AOConfig
from torchao.float8.float8_linear import Float8Linear as AOLinear

from fp8_dist import Float8Tensor


def test_the_version_compared_with() -> None:
    assert importlib.metadata.version("torchao") == "0.18.0"


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
    # (If the other operand has row scales, torchao expands the scale of a tensor for its kernel.)
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
            # torchao multiplies operands with row scales in bf16.
            exact = recipe == "tensorwise" and dtype is torch.float32
            assert sqnr(expected[gemm], found[gemm]) >= (100 if exact else 45), gemm
