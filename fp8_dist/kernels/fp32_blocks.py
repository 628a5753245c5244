"""Block scales in fp32, as FP8 checkpoints and inference engines have them.

``scale = max(amax, 1e-10) / fp8_max`` in fp32, correctly rounded. A cast has one of two forms,
which differ in some codes:

* ``saturate(x / scale)``: vLLM (``per_token_group_quant_fp8``).
* ``saturate(x * (1 / scale))``: slime, verl and SGLang (``blockwise_cast_to_fp8``).

Both are computed in fp32. Blocks are described as in :mod:`fp8_dist.kernels.blocks`.
"""

from collections.abc import Sequence

import torch

from fp8_dist.kernels.blocks import scaled_by
from fp8_dist.kernels.custom_op import custom_op

EPS = 1e-10


@custom_op("scales_of(Tensor amax, ScalarType dtype) -> Tensor")
def scales_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute the scales of blocks from their amaxes (fp32, any shape).

    A non-finite amax gives a non-finite scale.
    """
    # A GPU divides an fp32 tensor by a number by multiplying by the number's reciprocal. Rounded to
    # fp32, the fp64 quotient equals the fp32 quotient.
    return (amax.clamp(min=EPS).to(torch.float64) / torch.finfo(dtype).max).to(torch.float32)


@custom_op(
    "quantize_by_scales(Tensor x, Tensor scales, ScalarType dtype, int[] blocks, bool divides) "
    "-> Tensor",
    fake=lambda x, scales, dtype, *_: x.new_empty(x.shape, dtype=dtype),
)
def quantize_by_scales(
    x: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, blocks: Sequence[int], divides: bool
) -> torch.Tensor:
    """Cast a local tensor with one fp32 scale per block.

    Args:
        x: ``[..., M, K]``, floating point.
        scales: the scales of the blocks of ``x``.
        divides: whether values are divided by the scale. Otherwise they are multiplied by its
            reciprocal.

    Returns:
        A contiguous tensor of the shape of ``x``.
    """
    high, limit = x.to(torch.float32), torch.finfo(dtype).max
    factors, operation = (scales, torch.div) if divides else (scales.reciprocal(), torch.mul)
    quotient = scaled_by(high, factors, blocks, operation)
    return quotient.clamp_(-limit, limit).to(dtype, memory_format=torch.contiguous_format)
