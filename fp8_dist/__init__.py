"""Float8 training whose communication is float8 too, on any mesh.

Convert a model, parallelize and shard it, train::

    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    apply_tp_plan(model, mesh["tp"], llama_tp_plan(model))  # fp8_dist.tensor_parallel
    fully_shard(model, mesh=mesh["dp"])
    ...
    optimizer.step()
    precompute_float8_dynamic_scale(model)
"""

from fp8_dist.auto_filter import auto_filter
from fp8_dist.cast import cast_to_float8
from fp8_dist.checkpoint_policy import selective_checkpoint_policy
from fp8_dist.config import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
)
from fp8_dist.convert import convert_to_float8_training
from fp8_dist.fsdp import (
    attach_precompute,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
)
from fp8_dist.linear.module import Float8Linear, invalidate_float8_scales
from fp8_dist.tensor.float8_tensor import Float8Tensor

precompute_float8_dynamic_scale_for_fsdp = precompute_float8_dynamic_scale

__all__ = [
    "CastConfig",
    "Float8GemmConfig",
    "Float8Linear",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "Float8Tensor",
    "ScalingGranularity",
    "ScalingType",
    "attach_precompute",
    "auto_filter",
    "cast_to_float8",
    "convert_to_float8_training",
    "invalidate_float8_scales",
    "precompute_float8_dynamic_scale",
    "precompute_float8_dynamic_scale_for_fsdp",
    "selective_checkpoint_policy",
    "sync_float8_amax_and_scale_history",
]
