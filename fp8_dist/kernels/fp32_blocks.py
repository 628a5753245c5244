"""Block scales in fp32, as in FP8 checkpoints and inference engines.

``scale = max(amax, 1e-10) / fp8_max`` and ``qdata = saturate(x / scale)``, both computed in fp32 as
in vLLM's ``per_token_group_quant_fp8``. Blocks are specified as in :mod:`fp8_dist.kernels.blocks`.
"""

from collections.abc import Sequence

import torch

from fp8_dist.kernels.blocks import scaled_by
from fp8_dist.kernels.custom_op import custom_op

_EPS = 1e-10


@custom_op()
def fp32_block_scales(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute the scales of blocks from their amaxes (fp32, any shape).

    A non-finite amax gives a non-finite scale.
    """
    # A GPU divides an fp32 tensor by a number by multiplying by the number's reciprocal. Rounded to
    # fp32, the fp64 quotient equals the fp32 quotient.
    return (amax.clamp(min=_EPS).to(torch.float64) / torch.finfo(dtype).max).to(torch.float32)


@custom_op(fake=lambda x, scales, dtype, *_: x.new_empty(x.shape, dtype=dtype))
def quantize_by_scales(
    x: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, blocks: Sequence[int]
) -> torch.Tensor:
    """Cast a local tensor ``[..., M, K]`` with one fp32 scale per block; contiguous."""
    limit = torch.finfo(dtype).max
    quotient = scaled_by(x.to(torch.float32), scales, blocks, torch.div)
    return quotient.clamp_(-limit, limit).to(dtype, memory_format=torch.contiguous_format)
