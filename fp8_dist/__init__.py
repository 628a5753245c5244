"""Float8 training whose communication is float8 too, on any mesh.

Convert a model, parallelize and shard it, train::

    config = Float8LinearConfig(enable_fsdp_float8_all_gather="auto")
    convert_to_float8_training(model, config=config)
    apply_tp_plan(model, mesh["tp"], llama_tp_plan(model))  # fp8_dist.tensor_parallel
    fully_shard(model, mesh=mesh["dp"])
    ...
    optimizer.step()
    update_float8_scales(model)
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
from fp8_dist.export import float8_quantization_config, float8_state_dict
from fp8_dist.fsdp import (
    Float8AllGatherWeight,
    attach_precompute,
    attach_update,
    precompute_float8_dynamic_scale,
    rewrap_float8_weights,
    sync_float8_amax_and_scale_history,
    update_float8_scales,
)
from fp8_dist.head_filter import skip_head
from fp8_dist.linear.module import Float8Linear, float8_layers, invalidate_float8_scales
from fp8_dist.linear.weight import Float8Weight
from fp8_dist.state import Float8State
from fp8_dist.summary import conversion_summary
from fp8_dist.tensor.float8_tensor import Float8Tensor
from fp8_dist.version import __version__

# The layers wrap weights in a type whose hooks are FSDP2's business, above their room.
Float8Weight.gather_type = Float8AllGatherWeight

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
    "__version__",
    "attach_precompute",
    "attach_update",
    "auto_filter",
    "cast_to_float8",
    "conversion_summary",
    "convert_to_float8_training",
    "float8_layers",
    "float8_quantization_config",
    "float8_state_dict",
    "invalidate_float8_scales",
    "precompute_float8_dynamic_scale",
    "precompute_float8_dynamic_scale_for_fsdp",
    "rewrap_float8_weights",
    "selective_checkpoint_policy",
    "skip_head",
    "sync_float8_amax_and_scale_history",
    "update_float8_scales",
]
