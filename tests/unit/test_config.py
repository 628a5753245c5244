"""Configs: what None means, what is refused and with which words."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from fp8_dist import (
    CastConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
)
from fp8_dist.config import GEMM_OPERANDS, CastSpec

AXISWISE, BLOCKWISE = ScalingGranularity.AXISWISE, ScalingGranularity.BLOCKWISE
OFF = CastConfig(ScalingType.DISABLED)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def test_none_means_the_operands_default_and_is_not_filled_in() -> None:
    shared = CastConfig()
    config = Float8LinearConfig(
        cast_config_input=shared, cast_config_weight=shared, cast_config_grad_output=shared
    )
    assert config.casts("input") == config.casts("weight") == (CastSpec(E4M3),)
    assert config.casts("grad_output") == (CastSpec(E5M2),)
    assert shared.target_dtype is None
    assert config.cast_config_input_for_grad_weight is None
    assert config.cast_config("input", "grad_weight") is shared


def test_a_replaced_first_cast_is_followed_by_the_second() -> None:
    e5m2 = CastConfig(target_dtype=E5M2)
    config = replace(Float8LinearConfig(), cast_config_input=e5m2)
    assert config.cast_config("input", "grad_weight") is e5m2


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
    assert everything.casts("weight") == ()


def casts_of(config: Float8LinearConfig) -> str:
    """A line per GEMM with what its operands are cast to, and one with what can travel."""
    lines = []
    for gemm, operands in GEMM_OPERANDS.items():
        casts = [config.cast(operand, gemm) for operand in operands]
        shown = [
            f"{operand} "
            + (
                f"{c.dtype} per {c.granularity.name}{', delayed' * c.delayed}"
                if c
                else "high precision"
            )
            for operand, c in zip(operands, casts, strict=True)
        ]
        lines.append(f"  {gemm}: {'; '.join(shown)}")
    moving = [o for o in ("input", "weight", "grad_output") if config.gather_cast(o)]  # type: ignore[arg-type]
    lines.append(f"  travels in float8: {', '.join(moving) or 'nothing'}")
    return "\n".join(lines).replace("torch.float8_", "")


def test_recipes_by_name() -> None:
    configs = {r: Float8LinearConfig.from_recipe_name(r) for r in Float8LinearRecipeName}
    assert configs == {r: Float8LinearConfig.from_recipe_name(r.value) for r in configs}
    assert configs[Float8LinearRecipeName.TENSORWISE] == Float8LinearConfig()
    assert [r.value for r, c in configs.items() if c.round_scales_to_power_of_2] == [
        "rowwise",
        "rowwise_with_gw_hp",
        "rowwise_folded",
        "blockwise",
        "mxfp8",
    ]
    assert_expected_inline(
        "\n".join(f"{recipe.value}\n{casts_of(config)}" for recipe, config in configs.items()),
        """\
tensorwise
  output: input e4m3fn per tensor; weight e4m3fn per tensor
  grad_input: grad_output e5m2 per tensor; weight e4m3fn per tensor
  grad_weight: grad_output e5m2 per tensor; input e4m3fn per tensor
  travels in float8: input, weight, grad_output
rowwise
  output: input e4m3fn per row; weight e4m3fn per row
  grad_input: grad_output e4m3fn per row; weight e4m3fn per column
  grad_weight: grad_output e4m3fn per column; input e4m3fn per column
  travels in float8: nothing
rowwise_with_gw_hp
  output: input e4m3fn per row; weight e4m3fn per row
  grad_input: grad_output e4m3fn per row; weight e4m3fn per tensor
  grad_weight: grad_output high precision; input high precision
  travels in float8: nothing
rowwise_folded
  output: input e4m3fn per row; weight e4m3fn per row
  grad_input: grad_output e4m3fn per row; weight e4m3fn per row
  grad_weight: grad_output e4m3fn per row; input e4m3fn per row
  travels in float8: input, weight, grad_output
blockwise
  output: input e4m3fn per block of 1 x 128; weight e4m3fn per block of 128 x 128
  grad_input: grad_output e4m3fn per block of 1 x 128; weight e4m3fn per block of 128 x 128
  grad_weight: grad_output e4m3fn per block of 1 x 128; input e4m3fn per block of 1 x 128
  travels in float8: input, weight, grad_output
mxfp8
  output: input e4m3fn per block of 1 x 32 (MX); weight e4m3fn per block of 32 x 32 (MX)
  grad_input: grad_output e4m3fn per block of 1 x 32 (MX); weight e4m3fn per block of 32 x 32 (MX)
  grad_weight: grad_output e4m3fn per block of 1 x 32 (MX); input e4m3fn per block of 1 x 32 (MX)
  travels in float8: input, weight, grad_output
delayed
  output: input e4m3fn per tensor, delayed; weight e4m3fn per tensor, delayed
  grad_input: grad_output e5m2 per tensor, delayed; weight e4m3fn per tensor, delayed
  grad_weight: grad_output e5m2 per tensor, delayed; input e4m3fn per tensor, delayed
  travels in float8: input, weight, grad_output""",
    )


def test_configs_are_frozen_and_hashable() -> None:
    config = Float8LinearConfig()
    with pytest.raises(FrozenInstanceError):
        config.emulate = True  # type: ignore[misc]
    assert len({config, Float8LinearConfig()}) == 1


def test_auto_gathers_in_float8_where_one_copy_serves_both_gemms() -> None:
    gathered = set()
    for name in Float8LinearRecipeName:
        config = replace(
            Float8LinearConfig.from_recipe_name(name), enable_fsdp_float8_all_gather="auto"
        )
        assert config.enable_fsdp_float8_all_gather == "auto"
        gathered |= {name.value} if config.fsdp_float8_all_gather else set()
        off = replace(config, enable_fsdp_float8_all_gather=False)
        assert off.fsdp_float8_all_gather is False
    assert gathered == {"tensorwise", "rowwise_folded", "blockwise", "mxfp8", "delayed"}
    assert Float8LinearConfig(enable_fsdp_float8_all_gather=True).fsdp_float8_all_gather is True
    disabled = Float8LinearConfig(
        enable_fsdp_float8_all_gather="auto",
        cast_config_weight_for_grad_input=OFF,
        cast_config_grad_output=OFF,
        cast_config_grad_output_for_grad_weight=CastConfig(),
    )
    assert disabled.fsdp_float8_all_gather is False


def recipe(name: str, **changes: Any) -> Float8LinearConfig:
    return replace(Float8LinearConfig.from_recipe_name(name), **changes)


def blocks(rows: int, columns: Any) -> CastConfig:
    return CastConfig(scaling_granularity=BLOCKWISE, block_size=(rows, columns))


REFUSED: dict[str, tuple[type[Exception], Callable[[], object]]] = {
    "unknown recipe": (ValueError, lambda: Float8LinearConfig.from_recipe_name("fast")),
    "dtype": (ValueError, lambda: CastConfig(target_dtype=torch.bfloat16)),
    "type": (TypeError, lambda: CastConfig("dynamic")),  # type: ignore[arg-type]
    "no cast": (TypeError, lambda: Float8LinearConfig(cast_config_input=None)),  # type: ignore[arg-type]
    "no gemm": (TypeError, lambda: Float8LinearConfig(gemm_config_output=True)),  # type: ignore[arg-type]
    "no bool": (TypeError, lambda: Float8LinearConfig(pad_inner_dim="no")),  # type: ignore[arg-type]
    "delayed rows": (ValueError, lambda: CastConfig(ScalingType.DELAYED, AXISWISE)),
    "one operand disabled": (ValueError, lambda: Float8LinearConfig(cast_config_weight=OFF)),
    "two dtypes": (
        ValueError,
        lambda: Float8LinearConfig(cast_config_input_for_grad_weight=CastConfig(target_dtype=E5M2)),
    ),
    "gather of a disabled weight": (
        ValueError,
        lambda: Float8LinearConfig(
            enable_fsdp_float8_all_gather=True,
            cast_config_weight_for_grad_input=OFF,
            cast_config_grad_output=OFF,
            cast_config_grad_output_for_grad_weight=CastConfig(),
        ),
    ),
    "amax scope": (ValueError, lambda: Float8LinearConfig(amax_scope="node")),  # type: ignore[arg-type]
    "history": (ValueError, lambda: Float8LinearConfig(amax_history_len=4)),
    "no history": (ValueError, lambda: recipe("delayed", amax_history_len=0)),
    "delayed once": (
        ValueError,
        lambda: recipe("delayed", cast_config_input_for_grad_weight=CastConfig()),
    ),
    "delayed on one rank": (ValueError, lambda: recipe("delayed", amax_scope="rank")),
    "gather": (ValueError, lambda: Float8LinearConfig(enable_fsdp_float8_all_gather="on")),  # type: ignore[arg-type]
    "gather type": (TypeError, lambda: Float8LinearConfig(enable_fsdp_float8_all_gather=1)),  # type: ignore[arg-type]
    "gather of two casts": (
        ValueError,
        lambda: recipe("rowwise", enable_fsdp_float8_all_gather=True),
    ),
    "gather of two granularities": (
        ValueError,
        lambda: recipe("rowwise_with_gw_hp", enable_fsdp_float8_all_gather=True),
    ),
    "fold of tensors": (ValueError, lambda: Float8LinearConfig(fold_row_scales=True)),
    "fold of one tensor": (
        ValueError,
        lambda: recipe("rowwise_folded", cast_config_grad_output=CastConfig()),
    ),
    "fold of a second cast": (
        ValueError,
        lambda: recipe("rowwise_with_gw_hp", fold_row_scales=True),
    ),
    "fold of any scales": (
        ValueError,
        lambda: recipe("rowwise_folded", round_scales_to_power_of_2=False),
    ),
    "blocks without a size": (ValueError, lambda: CastConfig(scaling_granularity=BLOCKWISE)),
    "blocks of nothing": (ValueError, lambda: blocks(0, 128)),
    "blocks of halves": (ValueError, lambda: blocks(1, 0.5)),
    "blocks of 3 dims": (
        ValueError,
        lambda: CastConfig(scaling_granularity=BLOCKWISE, block_size=(1, 1, 128)),  # type: ignore[arg-type]
    ),
    "a size of tensors": (ValueError, lambda: CastConfig(block_size=(1, 128))),
    "a rule of tensors": (ValueError, lambda: CastConfig(scale_rule="ceil")),
    "a rule without a name": (ValueError, lambda: replace(blocks(1, 128), scale_rule="even")),  # type: ignore[arg-type]
    "delayed blocks": (
        ValueError,
        lambda: replace(blocks(1, 128), scaling_type=ScalingType.DELAYED),
    ),
    "blocks of a weight's rows": (
        ValueError,
        lambda: recipe("blockwise", cast_config_weight=blocks(1, 128)),
    ),
    "a weight's blocks that are no squares": (
        ValueError,
        lambda: recipe("blockwise", cast_config_weight=blocks(128, 64)),
    ),
    "blocks of an input's columns": (
        ValueError,
        lambda: recipe("blockwise", cast_config_input=blocks(128, 128)),
    ),
    "blocks of a gradient's columns": (
        ValueError,
        lambda: recipe("blockwise", cast_config_grad_output=blocks(128, 1)),
    ),
    "blocks by a tensor": (
        ValueError,
        lambda: recipe("blockwise", cast_config_weight=CastConfig()),
    ),
    "blocks by rows": (
        ValueError,
        lambda: recipe("rowwise", cast_config_input_for_grad_weight=blocks(1, 32)),
    ),
    "two casts in blocks": (
        ValueError,
        lambda: recipe("blockwise", cast_config_weight_for_grad_input=blocks(32, 32)),
    ),
    "blocks without powers of two": (
        ValueError,
        lambda: recipe("blockwise", round_scales_to_power_of_2=False),
    ),
    "fold of blocks": (ValueError, lambda: recipe("blockwise", fold_row_scales=True)),
    "recompute": (ValueError, lambda: Float8LinearConfig(force_recompute_fp8_weight_in_bwd=True)),
}


def test_refusals() -> None:
    texts = []
    for name, (kind, call) in REFUSED.items():
        with pytest.raises(kind) as info:
            call()
        texts.append(f"{name}: {info.value}")
    assert_expected_inline(
        "\n".join(texts),
        """\
unknown recipe: recipe_name='fast' is not one of ['tensorwise', 'rowwise', 'rowwise_with_gw_hp', 'rowwise_folded', 'blockwise', 'mxfp8', 'delayed']
dtype: CastConfig.target_dtype=torch.bfloat16 is not a float8 dtype; use one of torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, or None for the operand's default
type: CastConfig.scaling_type must be a ScalingType, got 'dynamic'
no cast: Float8LinearConfig.cast_config_input must be a CastConfig, got None
no gemm: Float8LinearConfig.gemm_config_output must be a Float8GemmConfig, got True
no bool: Float8LinearConfig.pad_inner_dim must be a bool, got 'no'
delayed rows: CastConfig: ScalingType.DELAYED keeps the history of one amax per tensor; rows and blocks come and go; use TENSORWISE, or ScalingType.DYNAMIC
one operand disabled: Float8LinearConfig: the GEMM of output multiplies input by weight, and weight is DISABLED while input is not; disable both or neither
two dtypes: Float8LinearConfig: input is cast to ['torch.float8_e4m3fn', 'torch.float8_e5m2'] in its two GEMMs; both casts need the same target_dtype
gather of a disabled weight: Float8LinearConfig: enable_fsdp_float8_all_gather=True gathers the weight in float8 only, but the GEMM of grad_input has its weight cast DISABLED; leave it off, or enable that cast
amax scope: Float8LinearConfig.amax_scope='node': use 'global' or 'rank'
history: Float8LinearConfig.amax_history_len=4 has no effect: it belongs to ScalingType.DELAYED, which no operand of this config uses; drop it
no history: Float8LinearConfig.amax_history_len=0: use an integer of at least 1
delayed once: Float8LinearConfig: input has a DELAYED scale in one GEMM and a DYNAMIC one in the other; use one scaling_type for both, or DISABLED
delayed on one rank: Float8LinearConfig.amax_scope='rank': the scale of input, weight, grad_output is DELAYED, it costs no all-reduce in the step and is that of the global tensor; use 'global'
gather: Float8LinearConfig.enable_fsdp_float8_all_gather='on': use True, False or 'auto'
gather type: Float8LinearConfig.enable_fsdp_float8_all_gather must be a bool or str, got 1
gather of two casts: Float8LinearConfig: enable_fsdp_float8_all_gather=True gathers one float8 copy of the weight, but its GEMMs take two, with one scale per row and one per column; leave it off (FSDP2 then gathers in high precision), or use the recipe rowwise_folded
gather of two granularities: Float8LinearConfig: enable_fsdp_float8_all_gather=True gathers one float8 copy of the weight, but its GEMMs take two, with one scale per row and one per tensor; leave it off (FSDP2 then gathers in high precision), or use the recipe rowwise_folded
fold of tensors: Float8LinearConfig: fold_row_scales=True needs one scale per row, and input has another cast; use ScalingGranularity.AXISWISE, ScalingType.DYNAMIC (or DISABLED) in all of its GEMMs
fold of one tensor: Float8LinearConfig: fold_row_scales=True needs one scale per row, and grad_output has another cast; use ScalingGranularity.AXISWISE, ScalingType.DYNAMIC (or DISABLED) in all of its GEMMs
fold of a second cast: Float8LinearConfig: fold_row_scales=True needs one scale per row, and weight has another cast; use ScalingGranularity.AXISWISE, ScalingType.DYNAMIC (or DISABLED) in all of its GEMMs
fold of any scales: Float8LinearConfig: fold_row_scales=True casts a gradient again after its scales were folded in, which is exact for powers of two only; set round_scales_to_power_of_2=True
blocks without a size: CastConfig.block_size=None: BLOCKWISE needs (rows, columns) of a block, two positive integers, such as (1, 128)
blocks of nothing: CastConfig.block_size=(0, 128): BLOCKWISE needs (rows, columns) of a block, two positive integers, such as (1, 128)
blocks of halves: CastConfig.block_size=(1, 0.5): BLOCKWISE needs (rows, columns) of a block, two positive integers, such as (1, 128)
blocks of 3 dims: CastConfig.block_size=(1, 1, 128): BLOCKWISE needs (rows, columns) of a block, two positive integers, such as (1, 128)
a size of tensors: CastConfig: block_size=(1, 128) and scale_rule=None are for ScalingGranularity.BLOCKWISE; drop them, or set that
a rule of tensors: CastConfig: block_size=None and scale_rule='ceil' are for ScalingGranularity.BLOCKWISE; drop them, or set that
a rule without a name: CastConfig.scale_rule='even': use 'ceil', 'floor' or None
delayed blocks: CastConfig: ScalingType.DELAYED keeps the history of one amax per tensor; rows and blocks come and go; use TENSORWISE, or ScalingType.DYNAMIC
blocks of a weight's rows: Float8LinearConfig: weight has blocks of 1 x 128, but one copy must serve both of its GEMMs; its block_size must be a square
a weight's blocks that are no squares: Float8LinearConfig: weight has blocks of 128 x 64, but one copy must serve both of its GEMMs; its block_size must be a square
blocks of an input's columns: Float8LinearConfig: input has blocks of 128 x 128, but one copy must serve both of its GEMMs; its block_size must be one row
blocks of a gradient's columns: Float8LinearConfig: grad_output has blocks of 128 x 1, but one copy must serve both of its GEMMs; its block_size must be one row
blocks by a tensor: Float8LinearConfig: the GEMM of output multiplies input by weight, and only one of them has scales of blocks; set ScalingGranularity.BLOCKWISE for both or neither
blocks by rows: Float8LinearConfig: input has one scale per row and one per block of 1 x 32 in its two GEMMs; one copy with scales of blocks must serve both, or leave one of them DISABLED
two casts in blocks: Float8LinearConfig: weight has one scale per block of 128 x 128 and one per block of 32 x 32 in its two GEMMs; one copy with scales of blocks must serve both, or leave one of them DISABLED
blocks without powers of two: Float8LinearConfig: the scales of BLOCKWISE casts are powers of two; set round_scales_to_power_of_2=True
fold of blocks: Float8LinearConfig: fold_row_scales=True needs one scale per row, and input has another cast; use ScalingGranularity.AXISWISE, ScalingType.DYNAMIC (or DISABLED) in all of its GEMMs
recompute: Float8LinearConfig.force_recompute_fp8_weight_in_bwd=True has no meaning here: the weight is kept as float8 and FSDP2 gathers it again by itself; drop the flag""",
    )
