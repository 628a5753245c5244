"""Policy of selective activation checkpointing that saves GEMMs, collectives and amaxes.

::

    context_fn = partial(create_selective_checkpoint_contexts, selective_checkpoint_policy)
    checkpoint(block, x, use_reentrant=False, context_fn=context_fn)

Both functions are from ``torch.utils.checkpoint``. Only elementwise operations are recomputed then:
norms, activations, and the casts, with the scales of the forward. On a GPU a cast by rows or blocks
computes its amaxes again, in the same pass. In compiled code so does a cast with a history; a
weight's scales are known by then.
"""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from fp8_dist.kernels import amax, amaxes, block_exponents, block_scaled_mm, scaled_mm
from fp8_dist.linear.amax_history import history_scaling, record_amax
from fp8_dist.linear.weight_queries import weight_scalings
from fp8_dist.torch_internals import funcol

aten = torch.ops.aten

# Neither the absolute values of a weight nor float8 copies are saved. An amax has four bytes per
# scale, an exponent one byte per block.
_SAVED: set[Any] = {
    amax.overload,
    amaxes.overload,
    block_exponents.overload,
    block_scaled_mm.overload,
    history_scaling.overload,
    record_amax.overload,
    scaled_mm.overload,
    weight_scalings.overload,
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    funcol.all_gather_into_tensor.default,
    funcol.all_reduce.default,
    funcol.all_to_all_single.default,
    funcol.reduce_scatter_tensor.default,
    funcol.wait_tensor.default,
}


def selective_checkpoint_policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy for ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

    It saves the results of GEMMs, attention, collectives and amaxes, and recomputes all else. The
    recomputation then repeats no collective, no GEMM and no pass over a tensor for its amax.
    """
    return CheckpointPolicy.MUST_SAVE if func in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE
