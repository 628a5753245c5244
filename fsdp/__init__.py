"""FSDP2 with float8 weight gathers, one all-reduce for all scales, and clipping on any meshes."""

if __name__ != "fp8_dist.fsdp":
    raise ImportError(
        f"this package is fp8_dist.fsdp, not {__name__}: import fp8_dist.fsdp (from the root of a "
        "checkout, or after pip install)"
    )

from fp8_dist.fsdp.averages import average_gradients_over
from fp8_dist.fsdp.clip import clip_grad_norm_
from fp8_dist.fsdp.gradient_transport import set_gradient_transport
from fp8_dist.fsdp.micro_batches import micro_batches
from fp8_dist.fsdp.precompute import precompute_float8_dynamic_scale
from fp8_dist.fsdp.update import (
    attach_update,
    sync_float8_amax_and_scale_history,
    update_float8_scales,
)
from fp8_dist.fsdp.weight import Float8AllGatherWeight
from fp8_dist.mesh import make_amax_group

__all__ = [
    "Float8AllGatherWeight",
    "attach_update",
    "average_gradients_over",
    "clip_grad_norm_",
    "make_amax_group",
    "micro_batches",
    "precompute_float8_dynamic_scale",
    "set_gradient_transport",
    "sync_float8_amax_and_scale_history",
    "update_float8_scales",
]
