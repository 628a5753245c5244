"""The public names of ``fp8_dist``. Its import registers adapters of experts and FLOP formulas."""

from fp8_dist import integrations as _integrations  # noqa: F401  # registers kinds of experts
from fp8_dist.config import (
    CastConfig as CastConfig,
    Float8GemmConfig as Float8GemmConfig,
    Float8LinearConfig as Float8LinearConfig,
    ScalingGranularity as ScalingGranularity,
    ScalingType as ScalingType,
)
from fp8_dist.fsdp import (
    attach_update as attach_update,
    precompute_float8_dynamic_scale as precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history as sync_float8_amax_and_scale_history,
    update_float8_scales as update_float8_scales,
)
from fp8_dist.linear import (
    Float8Linear as Float8Linear,
    float8_layers as float8_layers,
    invalidate_float8_scales as invalidate_float8_scales,
)
from fp8_dist.model import flops as _flops  # noqa: F401  # registers FLOP formulas
from fp8_dist.model.checkpoint_policy import (
    selective_checkpoint_policy as selective_checkpoint_policy,
)
from fp8_dist.model.convert import (
    convert_to_float8_training as convert_to_float8_training,
    convert_to_linear as convert_to_linear,
)
from fp8_dist.model.export import (
    WeightEntry as WeightEntry,
    float8_quantization_config as float8_quantization_config,
    float8_state_dict as float8_state_dict,
    iter_float8_weights as iter_float8_weights,
)
from fp8_dist.model.filters import auto_filter as auto_filter, skip_head as skip_head
from fp8_dist.model.freeze import (
    dequantized as dequantized,
    freeze_to_float8 as freeze_to_float8,
    unfreeze_from_float8 as unfreeze_from_float8,
)
from fp8_dist.model.load import load_float8_checkpoint as load_float8_checkpoint
from fp8_dist.model.report import conversion_summary as conversion_summary
from fp8_dist.model.state import Float8State as Float8State
from fp8_dist.operand.cast import cast_to_float8 as cast_to_float8
from fp8_dist.recipe_names import Float8LinearRecipeName as Float8LinearRecipeName
from fp8_dist.tensor import Float8Tensor as Float8Tensor
from fp8_dist.version import __version__ as __version__

precompute_float8_dynamic_scale_for_fsdp = precompute_float8_dynamic_scale
