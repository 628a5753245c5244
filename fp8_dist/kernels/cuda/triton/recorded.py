"""Casts with a given scale, and the amax for a later scale."""

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.results import RecordedCast
from fp8_dist.kernels.cuda.triton.casts import quantize_and_reduce
from fp8_dist.kernels.cuda.triton.launch import blocks, tuned
from fp8_dist.kernels.cuda.triton.rounding import magnitude
from fp8_dist.kernels.cuda.zeros import zero


@tuned(blocks(1))
@triton.jit
def _record(
    amax: tl.tensor,
    scale: tl.tensor,
    recorded: tl.tensor,
    poisoned: tl.tensor,
    largest: tl.tensor,
    KNOWN: tl.constexpr,
) -> None:
    # The only instance. Moves a few numbers.
    value = tl.load(amax)
    tl.store(poisoned, tl.load(scale) + value * 0.0)
    bits = magnitude(value)
    if KNOWN:
        bits = tl.maximum(bits, magnitude(tl.load(recorded)))
    tl.store(largest, bits)


def cast_and_record(
    x: torch.Tensor,
    multiplier: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    recorded: torch.Tensor | None,
    *,
    row_major: bool = True,
    column_major: bool = False,
) -> RecordedCast:
    """Cast a matrix to float8 with a given multiplier, and return its amax too.

    Args:
        x: ``[M, K]``, bf16, fp16 or fp32, any strides.
        multiplier, scale: fp32, 0-dim.
        dtype: a float8 dtype.
        recorded: the largest amax so far, fp32, 0-dim; ``None`` if there is none.
        row_major: whether to write ``qdata``.
        column_major: whether to write ``qdata_t``.

    Two launches; 3 bytes per bf16 element, 4 for both layouts.
    """
    amax = zero(x.device)
    layouts = quantize_and_reduce(
        x, multiplier, dtype, amax, row_major=row_major, column_major=column_major
    )
    poisoned, largest = (torch.empty((), dtype=torch.float32, device=x.device) for _ in range(2))
    _record(
        lambda chosen: (1,),
        (),
        x.device,
        *(amax, scale, recorded, poisoned, largest.view(torch.int32)),
        KNOWN=recorded is not None,
    )
    return RecordedCast(*layouts, amax, poisoned, largest)
