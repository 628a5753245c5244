"""Configs: what None means, what is refused."""

from dataclasses import FrozenInstanceError, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from reference import raised

from fp8_dist import (
    CastConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
)
from fp8_dist.moe import Float8ExpertsConfig
from fp8_dist.recipe import Operand
from fp8_dist.scaling import Dense

AXISWISE, BLOCKWISE = ScalingGranularity.AXISWISE, ScalingGranularity.BLOCKWISE
OFF = CastConfig(ScalingType.DISABLED)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def test_none_means_the_operands_default_and_is_not_filled_in() -> None:
    shared = CastConfig()
    config = Float8LinearConfig(
        cast_config_input=shared, cast_config_weight=shared, cast_config_grad_output=shared
    )
    schemes = config.recipe.schemes
    assert schemes["input"] == schemes["weight"] == (Dense(E4M3),)
    assert schemes["grad_output"] == (Dense(E5M2),)
    assert shared.target_dtype is None
    assert config.cast_config_input_for_grad_weight is None
    assert config.cast_config("input", "grad_weight") is shared


def test_gemms_can_be_disabled_one_by_one() -> None:
    config = Float8LinearConfig(
        cast_config_input_for_grad_weight=OFF, cast_config_grad_output_for_grad_weight=OFF
    )
    assert [config.gemm_enabled(g) for g in ("output", "grad_input", "grad_weight")] == [
        True,
        True,
        False,
    ]
    everything = Float8LinearConfig(
        cast_config_input=OFF, cast_config_weight=OFF, cast_config_grad_output=OFF
    )
    assert everything.recipe.schemes["weight"] == ()


def test_recipes_by_name() -> None:
    """(tests/unit/test_docs.py compares what each recipe casts with the table of the page.)"""
    configs = {r: Float8LinearConfig.from_recipe_name(r) for r in Float8LinearRecipeName}
    assert configs == {r: Float8LinearConfig.from_recipe_name(r.value) for r in configs}
    assert configs[Float8LinearRecipeName.TENSORWISE] == Float8LinearConfig()
    operands: tuple[Operand, ...] = ("input", "weight", "grad_output")
    for config, operand in product(configs.values(), operands):
        first, second = config.recipe.uses[operand].values()
        assert config.recipe.gather_scheme[operand] == (first if first == second else None)


def test_a_recipe_takes_any_field_of_the_config() -> None:
    for name in Float8LinearRecipeName:
        other = replace(recipe(name), pad_inner_dim=True, enable_fsdp_float8_all_gather="auto")
        assert recipe(name, pad_inner_dim=True, enable_fsdp_float8_all_gather="auto") == other
    weight = blocks(32, 32, scale_rule="ceil")
    found = recipe("mxfp8", cast_config_weight=weight, weight_source="master")
    assert found == replace(recipe("mxfp8"), cast_config_weight=weight)
    twice = partial(recipe, "mxfp8", cast_config_weight=weight, weight_format="mxfp4")
    assert "set the fields of cast_config_weight itself" in raised(ValueError, twice)
    for kind in (Float8LinearConfig, Float8ExpertsConfig):
        text = raised(TypeError, partial(kind.from_recipe_name, "mxfp8", fsdp=True, emulate=True))
        assert text.startswith(f"{kind.__name__}.from_recipe_name: there is no field fsdp; fields")
        assert "emulate, " in text
    assert Float8ExpertsConfig.from_recipe_name("mxfp8", combine="float8", emulate=True) == (
        Float8ExpertsConfig("mxfp8", combine="float8", emulate=True)
    )
    with pytest.raises(ValueError, match=r"Float8ExpertsConfig.combine must be .* got 'fp8'"):
        Float8ExpertsConfig.from_recipe_name("mxfp8", combine="fp8")


def test_configs_are_frozen_and_hashable() -> None:
    config = Float8LinearConfig()
    with pytest.raises(FrozenInstanceError):
        config.emulate = True  # type: ignore[misc]
    assert len({config, Float8LinearConfig()}) == 1


def test_auto_gathers_in_float8_where_one_copy_serves_both_gemms() -> None:
    for name in Float8LinearRecipeName:
        config = recipe(name, enable_fsdp_float8_all_gather="auto")
        assert config.enable_fsdp_float8_all_gather == "auto"
        assert config.fsdp_float8_all_gather is (len(config.recipe.schemes["weight"]) == 1)
        off = replace(config, enable_fsdp_float8_all_gather=False)
        assert off.fsdp_float8_all_gather is False
    assert Float8LinearConfig(enable_fsdp_float8_all_gather=True).fsdp_float8_all_gather is True
    disabled = Float8LinearConfig(enable_fsdp_float8_all_gather="auto", **WITHOUT_GRAD_INPUT)
    assert disabled.fsdp_float8_all_gather is False


def recipe(name: Float8LinearRecipeName | str, **changes: Any) -> Float8LinearConfig:
    return Float8LinearConfig.from_recipe_name(name, **changes)


def blocks(rows: int, columns: int, **fields: Any) -> CastConfig:
    return CastConfig(scaling_granularity=BLOCKWISE, block_size=(rows, columns), **fields)


WITHOUT_GRAD_INPUT = {
    "cast_config_weight_for_grad_input": OFF,
    "cast_config_grad_output": OFF,
    "cast_config_grad_output_for_grad_weight": CastConfig(),
}
GATHER = {"enable_fsdp_float8_all_gather": True}
HISTORY = "keeps the history of one amax per tensor"
SIZE = "BLOCKWISE needs (rows, columns) of a block, two positive integers"
DROP = "are for ScalingGranularity.BLOCKWISE; drop them"
SERVE = "but one copy must serve both of its GEMMs; its block_size must be"
ONE = "but their scaling schemes are not of one kind; use"
TWICE = "one copy with scales of blocks must serve both"
ROWS = "fold_row_scales=True needs one scale per row, and"
TWO = "but its GEMMs take it with one scale per row and with one scale per"
OF_BLOCKS = {"scaling_granularity": BLOCKWISE, "block_size": (1, 128)}
# Fields of a cast; a recipe and fields of its config.
CASTS: list[tuple[dict[str, Any], str]] = [
    ({"target_dtype": torch.bfloat16}, "torch.bfloat16 is not a float8 dtype; use one"),
    ({"scaling_type": ScalingType.DELAYED, "scaling_granularity": AXISWISE}, HISTORY),
    (OF_BLOCKS | {"scaling_type": ScalingType.DELAYED}, HISTORY),
    (OF_BLOCKS | {"block_size": None}, f"CastConfig.block_size=None: {SIZE}"),
    (OF_BLOCKS | {"block_size": (0, 128)}, SIZE),
    (OF_BLOCKS | {"block_size": (1, 0.5)}, SIZE),
    (OF_BLOCKS | {"block_size": (1, 1, 128)}, SIZE),
    ({"block_size": (1, 128)}, DROP),
    ({"scale_rule": "ceil"}, DROP),
    (
        OF_BLOCKS | {"scale_rule": "up"},
        "scale_rule must be None or 'ceil' or 'even' or 'floor', got",
    ),
    (OF_BLOCKS | {"scale_rule": "even"}, "and it alone has 'even'; change one"),
    ({"format": "mxfp4"}, DROP),
    ({"source": "bf16"}, DROP),
    (OF_BLOCKS | {"scale_format": "bf16"}, "scale_format must be 'ue8m0' or 'fp32', got 'bf16'"),
    (
        OF_BLOCKS | {"scale_format": "fp32", "scale_rule": "ceil"},
        "is for scales that are powers of",
    ),
    *(
        (OF_BLOCKS | {"format": "mxfp4", "target_dtype": dtype}, f"target_dtype={dtype}: mxfp4 has")
        for dtype in (E5M2, torch.float8_e4m3fnuz)
    ),
    (OF_BLOCKS | {"format": "mxfp6"}, "format must be 'e4m3' or 'mxfp4', got 'mxfp6'"),
    (
        OF_BLOCKS | {"format": "mxfp4", "scale_format": "fp32"},
        "format='mxfp4' does not go with scale_format='fp32'",
    ),
]
CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("tensorwise", {"cast_config_weight": OFF}, "weight is DISABLED while input is not"),
    (
        "tensorwise",
        {"cast_config_input_for_grad_weight": CastConfig(target_dtype=E5M2)},
        "in its two GEMMs; both casts need the same target_dtype",
    ),
    (
        "tensorwise",
        GATHER | WITHOUT_GRAD_INPUT,
        "take it with one scale per tensor and with high precision; leave it off",
    ),
    ("tensorwise", {"amax_history_len": 4}, "amax_history_len=4 has no effect: it belongs"),
    ("delayed", {"amax_history_len": 0}, "=0: use an integer of at least 1"),
    (
        "delayed",
        {"cast_config_input_for_grad_weight": CastConfig()},
        "input has a DELAYED scale in one GEMM and a DYNAMIC one in the other",
    ),
    (
        "tensorwise",
        {"enable_fsdp_float8_all_gather": "on"},
        "must be bool or None or 'auto', got 'on'",
    ),
    ("rowwise", GATHER, f"{TWO} column; leave it off"),
    ("mxfp8", {"scale_format": "fp32"}, "the recipe mxfp8 has no scale_format='fp32': "),
    ("rowwise", {"weight_source": "bf16"}, "source='bf16'"),
    ("rowwise_folded", {"cast_config_grad_output": CastConfig()}, f"{ROWS} grad_output has"),
    ("blockwise", {"fold_row_scales": True}, f"{ROWS} input has another cast"),
    ("rowwise_folded", {"round_scales_to_power_of_2": False}, "exact for powers of two only; set"),
    ("blockwise", {"round_scales_to_power_of_2": False}, "scales of BLOCKWISE casts are powers of"),
    ("blockwise", {"cast_config_weight": blocks(1, 128)}, f"{SERVE} a square"),
    ("blockwise", {"cast_config_input": blocks(128, 128)}, f"{SERVE} one row"),
    ("blockwise", {"cast_config_grad_output": blocks(128, 1)}, f"{SERVE} one row"),
    ("blockwise", {"cast_config_weight": CastConfig()}, ONE),
    ("rowwise", {"cast_config_input_for_grad_weight": blocks(1, 32)}, TWICE),
    ("blockwise", {"cast_config_weight_for_grad_input": blocks(32, 32)}, TWICE),
    ("tensorwise", {"force_recompute_fp8_weight_in_bwd": True}, "and FSDP2 gathers it again by it"),
    *(
        ("mxfp8", {f"cast_config_{operand}": blocks(1, 32, format="mxfp4")}, "which is for weights")
        for operand in ("input", "grad_output")
    ),
    (
        "mxfp8",
        {"cast_config_weight": blocks(16, 16, format="mxfp4")},
        "a multiple of 32; use block",
    ),
]


def test_refusals() -> None:
    for arguments, text in CASTS:
        assert text in raised(ValueError, partial(CastConfig, **arguments)), arguments
    for name, changes, text in CONFIGS:
        assert text in raised(ValueError, partial(recipe, name, **changes)), (name, changes)
    named = Float8LinearConfig.from_recipe_name
    for name in Float8LinearRecipeName:
        if named(name).cast_config_weight.block_size is None:
            assert DROP in raised(ValueError, partial(named, name, weight_format="mxfp4"))
    unknown = raised(ValueError, lambda: Float8LinearConfig.from_recipe_name("fast"))
    assert unknown.startswith("recipe_name='fast' is not one of ['tensorwise', 'rowwise',")
    wrong_types: list[tuple[Any, str, Any, str]] = [
        (CastConfig, "scaling_type", "dynamic", "ScalingType"),
        (Float8LinearConfig, "cast_config_input", None, "CastConfig"),
        (Float8LinearConfig, "gemm_config_output", True, "Float8GemmConfig"),
        (Float8LinearConfig, "pad_inner_dim", "no", "bool"),
        (Float8LinearConfig, "amax_history_len", True, "int"),
    ]
    for kind, field, value, expected in wrong_types:
        text = raised(TypeError, partial(kind, **{field: value}))
        assert text == f"{kind.__name__}.{field} must be {expected}, got {value!r}"
