"""The public names of ``fp8_dist``. Its import registers adapters of experts and FLOP formulas."""

import fp8_dist.integrations  # noqa: F401  # registers kinds of experts
from fp8_dist.config import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    ScalingGranularity,
    ScalingType,
)
from fp8_dist.fsdp import (
    attach_update,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
    update_float8_scales,
)
from fp8_dist.linear.module import Float8Linear, float8_layers, invalidate_float8_scales
from fp8_dist.model.checkpoint_policy import selective_checkpoint_policy
from fp8_dist.model.convert import convert_to_float8_training, convert_to_linear
from fp8_dist.model.export import (
    WeightEntry,
    float8_quantization_config,
    float8_state_dict,
    iter_float8_weights,
)
from fp8_dist.model.filters import auto_filter, skip_head
from fp8_dist.model.flops import register as _register_flops
from fp8_dist.model.freeze import dequantized, freeze_to_float8, unfreeze_from_float8
from fp8_dist.model.load import load_float8_checkpoint
from fp8_dist.model.report import conversion_summary
from fp8_dist.model.state import Float8State
from fp8_dist.operand.cast import cast_to_float8
from fp8_dist.recipe_names import Float8LinearRecipeName
from fp8_dist.tensor.float8_tensor import Float8Tensor
from fp8_dist.version import __version__

_register_flops()

precompute_float8_dynamic_scale_for_fsdp = precompute_float8_dynamic_scale

__all__ = [
    "CastConfig",
    "Float8GemmConfig",
    "Float8Linear",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "Float8State",
    "Float8Tensor",
    "ScalingGranularity",
    "ScalingType",
    "WeightEntry",
    "__version__",
    "attach_update",
    "auto_filter",
    "cast_to_float8",
    "conversion_summary",
    "convert_to_float8_training",
    "convert_to_linear",
    "dequantized",
    "float8_layers",
    "float8_quantization_config",
    "float8_state_dict",
    "freeze_to_float8",
    "invalidate_float8_scales",
    "iter_float8_weights",
    "load_float8_checkpoint",
    "precompute_float8_dynamic_scale",
    "precompute_float8_dynamic_scale_for_fsdp",
    "selective_checkpoint_policy",
    "skip_head",
    "sync_float8_amax_and_scale_history",
    "unfreeze_from_float8",
    "update_float8_scales",
]
