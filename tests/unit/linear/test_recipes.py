"""The recipes on one device against their algebra in fp64, and every flag on each of them."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipe_algebra import (
    E4M3,
    E5M2,
    GEMMS,
    OPERANDS,
    RECIPES,
    config_of,
    exact,
    layer_of,
    operands,
    products,
    step,
)
from reference import float8_gemms, raised, same_bits, sqnr

from fp8_dist import CastConfig, Float8GemmConfig, Float8LinearConfig, ScalingType

OFF = CastConfig(ScalingType.DISABLED)
all_recipes = pytest.mark.parametrize("recipe", RECIPES)


BLOCKS = [name for name in RECIPES if config_of(name).cast_config_weight.block_size is not None]


def check(recipe: str, dtype: torch.dtype, sizes: tuple[int, int, int], outliers: bool) -> None:
    x, w, g = (t.to(dtype) for t in operands(*sizes, outliers))
    config = config_of(recipe)
    expected, found = products(config, x, w, g), step(layer_of(config, w), x, g)
    for gemm in GEMMS:
        best = sqnr(expected[gemm], expected[gemm].to(dtype))
        assert sqnr(expected[gemm], found[gemm]) > min(best - 0.5, 120), gemm
        assert found[gemm].dtype is dtype


@all_recipes
def test_the_three_gemms_equal_the_algebra(recipe: str) -> None:
    small, odd = (64, 48, 80), (33, 100, 17)
    check(recipe, torch.float32, small, True)
    check(recipe, torch.float32, odd, False)
    check(recipe, torch.bfloat16, odd, True)
    check(recipe, torch.bfloat16, small, False)
    check(recipe, torch.float16, odd, True)
    check(recipe, torch.float16, small, False)
    x, w, g = operands()
    found = step(layer_of(config_of(recipe), w), x, g)
    assert min(sqnr(product, found[gemm]) for gemm, product in exact(x, w, g).items()) > 18


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", BLOCKS)
def test_many_blocks_equal_the_algebra(recipe: str, dtype: torch.dtype) -> None:
    """Check whole blocks, and blocks that are cut at the end of each dim."""
    for sizes in ((256, 384, 128), (200, 300, 260), (1, 129, 257)):
        check(recipe, dtype, sizes, outliers=True)


@pytest.mark.parametrize("power_of_2", [False, True])
@all_recipes
def test_powers_of_two(recipe: str, power_of_2: bool) -> None:
    x, w, g = operands(outliers=True)
    only = {"exact for powers of two only": config_of(recipe).fold_row_scales}
    only["are powers of two"] = recipe in BLOCKS
    if any(only.values()) and not power_of_2:
        text = raised(ValueError, lambda: config_of(recipe, round_scales_to_power_of_2=False))
        assert [reason for reason in only if reason in text] == [r for r in only if only[r]]
        return
    config = config_of(recipe, round_scales_to_power_of_2=power_of_2)
    with float8_gemms() as multiplied:
        found = step(layer_of(config, w), x, g)
    expected = products(config, x, w, g)
    for gemm in GEMMS:
        assert sqnr(expected[gemm], found[gemm]) > 120, gemm
    assert len(multiplied) == sum(config.gemm_enabled(gemm) for gemm in GEMMS)
    for operand in (each for pair in multiplied for each in pair):
        if "block" in operand.scheme.covers:
            assert operand.scale.dtype is torch.uint8  # nothing but exponents
            continue
        are = torch.frexp(operand.scale).mantissa == 0.5
        assert bool(are.all()) is power_of_2


@all_recipes
def test_target_dtypes(recipe: str) -> None:
    config = config_of(recipe)
    x, w, g = operands(outliers=True)
    for operand, target in product(OPERANDS, (E4M3, E5M2)):
        fields = [f for f in vars(config) if f.startswith(f"cast_config_{operand}")]
        casts = {f: getattr(config, f) for f in fields if getattr(config, f) is not None}
        changed = {field: replace(cast, target_dtype=target) for field, cast in casts.items()}
        with float8_gemms() as multiplied:
            found = step(layer_of(config_of(recipe, **changed), w), x, g)
        expected = products(config_of(recipe, **changed), x, w, g)
        for gemm in GEMMS:
            assert sqnr(expected[gemm], found[gemm]) > 120, (operand, gemm)
        output, grad_input, *_ = multiplied
        cast = {"input": output[0], "weight": output[1], "grad_output": grad_input[0]}
        assert cast[operand].qdata.dtype is target


def without(gemm: str, config: Float8LinearConfig) -> dict[str, CastConfig]:
    """Changes to a config that leave one GEMM in high precision, and the others as they are."""
    if gemm == "output":
        return {
            "cast_config_input": OFF,
            "cast_config_weight": OFF,
            "cast_config_input_for_grad_weight": config.cast_config("input", "grad_weight"),
            "cast_config_weight_for_grad_input": config.cast_config("weight", "grad_input"),
        }
    if gemm == "grad_input":
        kept = config.cast_config("grad_output", "grad_weight")
        return {
            "cast_config_grad_output": OFF,
            "cast_config_weight_for_grad_input": OFF,
            "cast_config_grad_output_for_grad_weight": kept,
        }
    return {
        "cast_config_input_for_grad_weight": OFF,
        "cast_config_grad_output_for_grad_weight": OFF,
    }


@all_recipes
def test_a_gemm_that_is_disabled_leaves_the_others_as_they_are(recipe: str) -> None:
    x, w, g = operands(outliers=True)
    whole = step(layer_of(config_of(recipe), w), x, g)
    for gemm in GEMMS:
        changes = without(gemm, config_of(recipe))
        found = step(layer_of(config_of(recipe, **changes), w), x, g)
        for name in GEMMS:
            if name == gemm:
                assert sqnr(exact(x, w, g)[name], found[name]) > 120
            else:
                assert same_bits(whole[name], found[name]), (gemm, name)


@all_recipes
def test_all_gemms_disabled(recipe: str) -> None:
    x, w, g = operands()
    casts = [field for field in vars(config_of(recipe)) if field.startswith("cast_config")]
    config = config_of(recipe, **dict.fromkeys(casts, OFF))
    expected, found = exact(x, w, g), step(layer_of(config, w), x, g)
    assert all(sqnr(expected[gemm], found[gemm]) > 120 for gemm in GEMMS)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer_of(config, w)(x)
    assert same_bits(output, layer_of(config, w)(x.bfloat16()))
    assert output.dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@all_recipes
def test_flags_that_change_nothing_on_a_cpu(recipe: str, dtype: torch.dtype) -> None:
    x, w, g = (t.to(dtype) for t in operands(outliers=True))
    expected = step(layer_of(config_of(recipe), w), x, g)
    flags: list[dict[str, Any]] = [{"emulate": True}, {"pad_inner_dim": True}]
    for gemm in GEMMS:
        flags += [{f"gemm_config_{gemm}": Float8GemmConfig(fast)} for fast in (False, True)]
    for flag in flags:
        found = step(layer_of(config_of(recipe, **flag), w), x, g)
        assert all(same_bits(expected[name], found[name]) for name in expected), flag


@all_recipes
def test_strict_alignment(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, g = operands(33, 40, 24, outliers=True)
    free = step(layer_of(config_of(recipe), w), x, g)
    aligned = operands(33, 48, 32)
    monkeypatch.setenv("FP8_DIST_STRICT_ALIGNMENT", "1")
    padded = step(layer_of(config_of(recipe, pad_inner_dim=True), w), x, g)
    emulated = step(layer_of(config_of(recipe, emulate=True), w), x, g)
    for found in (padded, emulated):
        assert all(same_bits(free[name], found[name]) for name in free)
    text = raised(ValueError, lambda: step(layer_of(config_of(recipe), w), x, g))
    assert "multiples of 16 on this device, found out_features 24, in_features 40; set" in text
    # The number of rows is data: it may be anything.
    for pad in (False, True):
        config = config_of(recipe, pad_inner_dim=pad)
        found = step(layer_of(config, aligned[1]), aligned[0], aligned[2])
        expected = products(config, *aligned)
        assert all(sqnr(expected[gemm], found[gemm]) > 120 for gemm in GEMMS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@all_recipes
def test_the_bias(recipe: str, dtype: torch.dtype) -> None:
    x, w, g = (t.to(dtype) for t in operands())
    bias = torch.randn(80, dtype=dtype)
    found = step(layer_of(config_of(recipe), w, bias), x, g)
    assert same_bits(found["output"], step(layer_of(config_of(recipe), w), x, g)["output"] + bias)
    leaf = bias.clone().requires_grad_()
    F.linear(x, w, leaf).backward(g)
    assert same_bits(found["grad_bias"], leaf.grad)
