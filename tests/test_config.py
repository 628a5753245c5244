"""Configs: what None means, what is refused and with which words."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

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

OFF = CastConfig(ScalingType.DISABLED)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def test_none_means_the_operands_default_and_is_not_filled_in() -> None:
    shared = CastConfig()
    config = Float8LinearConfig(
        cast_config_input=shared, cast_config_weight=shared, cast_config_grad_output=shared
    )
    assert config.operand_dtype("input") is E4M3
    assert config.operand_dtype("weight") is E4M3
    assert config.operand_dtype("grad_output") is E5M2
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
    assert everything.operand_dtype("weight") is None


def test_recipes_by_name() -> None:
    for name in ("tensorwise", Float8LinearRecipeName.TENSORWISE):
        assert Float8LinearConfig.from_recipe_name(name) == Float8LinearConfig()


def test_configs_are_frozen_and_hashable() -> None:
    config = Float8LinearConfig()
    with pytest.raises(FrozenInstanceError):
        config.emulate = True  # type: ignore[misc]
    assert len({config, Float8LinearConfig()}) == 1


REFUSED: dict[str, tuple[type[Exception], Callable[[], object]]] = {
    "recipe": (NotImplementedError, lambda: Float8LinearConfig.from_recipe_name("rowwise")),
    "unknown recipe": (ValueError, lambda: Float8LinearConfig.from_recipe_name("fast")),
    "dtype": (ValueError, lambda: CastConfig(target_dtype=torch.bfloat16)),
    "type": (TypeError, lambda: CastConfig("dynamic")),  # type: ignore[arg-type]
    "no cast": (TypeError, lambda: Float8LinearConfig(cast_config_input=None)),  # type: ignore[arg-type]
    "no gemm": (TypeError, lambda: Float8LinearConfig(gemm_config_output=True)),  # type: ignore[arg-type]
    "no bool": (TypeError, lambda: Float8LinearConfig(pad_inner_dim="no")),  # type: ignore[arg-type]
    "delayed": (NotImplementedError, lambda: CastConfig(ScalingType.DELAYED)),
    "axiswise": (
        NotImplementedError,
        lambda: CastConfig(scaling_granularity=ScalingGranularity.AXISWISE),
    ),
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
recipe: recipe_name='rowwise' is not implemented; use one of ['tensorwise']
unknown recipe: recipe_name='fast' is not one of ['tensorwise']
dtype: CastConfig.target_dtype=torch.bfloat16 is not a float8 dtype; use one of torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, or None for the operand's default
type: CastConfig.scaling_type must be a ScalingType, got 'dynamic'
no cast: Float8LinearConfig.cast_config_input must be a CastConfig, got None
no gemm: Float8LinearConfig.gemm_config_output must be a Float8GemmConfig, got True
no bool: Float8LinearConfig.pad_inner_dim must be a bool, got 'no'
delayed: CastConfig: ScalingType.DELAYED is not implemented; use ScalingType.DYNAMIC
axiswise: CastConfig: ScalingGranularity.AXISWISE is not implemented; use TENSORWISE
one operand disabled: Float8LinearConfig: the GEMM of output multiplies input by weight, and weight is DISABLED while input is not; disable both or neither
two dtypes: Float8LinearConfig: input is cast to ['torch.float8_e4m3fn', 'torch.float8_e5m2'] in its two GEMMs; it is cast once, so both casts need the same target_dtype
gather of a disabled weight: Float8LinearConfig: enable_fsdp_float8_all_gather=True gathers the weight in float8 only, but the GEMM of grad_input has its weight cast DISABLED
amax scope: Float8LinearConfig.amax_scope='node': use 'global' or 'rank'
history: Float8LinearConfig.amax_history_len=4 has no effect: it belongs to ScalingType.DELAYED, which no operand of this config uses
recompute: Float8LinearConfig.force_recompute_fp8_weight_in_bwd=True has no meaning here: the weight is kept as float8 and FSDP2 gathers it again by itself; drop the flag""",
    )
