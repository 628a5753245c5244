"""Multipliers and scales from given amaxes, of histories or reduced over ranks."""

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton.launch import blocks, float8_constants, programs, tuned
from fp8_dist.kernels.cuda.triton.rounding import indices, multiplier_of, reciprocal


@tuned(blocks(4, BLOCK=1024))
@triton.jit
def _scaling(
    amax: tl.tensor,
    multiplier: tl.tensor,
    scale: tl.tensor,
    size: tl.tensor,
    POWER_OF_2: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # One instance: BLOCK amaxes. Moves 12 bytes each.
    i = indices(tl.program_id(0), BLOCK)
    m = multiplier_of(tl.load(amax + i, mask=i < size, other=1.0), POWER_OF_2, BIAS)
    tl.store(multiplier + i, m, mask=i < size)
    tl.store(scale + i, reciprocal(m), mask=i < size)


def scaling(
    amax: torch.Tensor, dtype: torch.dtype, power_of_2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fp8_dist.kernels.scaling_from_amax`, for amaxes of any shape. One launch."""
    amax = amax.contiguous()
    multiplier, scale = torch.empty_like(amax), torch.empty_like(amax)
    size = amax.numel()
    _scaling(
        lambda chosen: (programs(size, chosen["BLOCK"]),),
        (),
        amax.device,
        *(amax, multiplier, scale, size),
        POWER_OF_2=power_of_2,
        **float8_constants(dtype, amax.device),
    )
    return multiplier, scale
