"""A policy for selective activation checkpointing that saves GEMMs, collectives and amaxes.

::

    context_fn = partial(create_selective_checkpoint_contexts, selective_checkpoint_policy)
    checkpoint(block, x, use_reentrant=False, context_fn=context_fn)

Both functions are from ``torch.utils.checkpoint``. Then only elementwise operations are recomputed:
norms, activations, and casts with the scales of the forward. On a GPU, a cast by rows or blocks
computes its amaxes again, in the same pass. In compiled code, a cast with a history does so, too.
The scales of weights are available then, except in compiled code on a GPU for weights that are not
distributed. For experts, the routing is saved: the order of the slots, and the numbers of rows,
for which the host would wait again.
"""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from fp8_dist.kernels.blocks import block_exponents
from fp8_dist.kernels.gemm import block_scaled_mm, scaled_mm
from fp8_dist.kernels.scale import amax, amaxes
from fp8_dist.moe.dispatch import numbers_of_rows, slots_by_expert
from fp8_dist.moe.operators import grouped_mm_operator
from fp8_dist.operand.state import look_up
from fp8_dist.scaling.operators import measure_operator, multiply_operator
from fp8_dist.torch_internals import funcol

aten = torch.ops.aten

# Neither the absolute values of a weight nor float8 copies are saved. A saved amax takes at most
# four bytes per scale, and a saved exponent one byte per block.
_AMAXES = (amax, amaxes, block_exponents, measure_operator)
_GEMMS = (block_scaled_mm, grouped_mm_operator, multiply_operator, scaled_mm)
_SAVED: set[Any] = {
    *(operator.overload for operator in (*_AMAXES, *_GEMMS, numbers_of_rows, slots_by_expert)),
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_mm.default,
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
    """Save GEMMs, attention, collectives, amaxes and routing, and recompute everything else.

    This is a policy for ``torch.utils.checkpoint.create_selective_checkpoint_contexts``. With it,
    the recomputation repeats no collective, no GEMM and no pass over a tensor for its amax.
    """
    # In compiled code on GPUs, amaxes may be taken of integers.
    saves = func in _SAVED or (func is aten.amax.default and not args[0].dtype.is_floating_point)
    if func is look_up.overload:
        saves = not args[6] and not args[7]  # neither of FSDP2's gathers, nor with a cast
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE
