"""Scaled GEMMs on CPUs, emulated. Float8 data is exact in bf16, and so are its products in fp32.

* bf16 output, one scale for each operand: a bf16 GEMM of the upcast data, which accumulates in
  fp32, with the product of the scales as its alpha. It rounds once, at the end.
* bf16 output, power-of-two scales of rows and columns: a bf16 GEMM, whose result is scaled. This is
  as exact, because scaling by a power of two does not round.
* fp32 and fp16 output, and other scales: an fp64 GEMM. Sums of e4m3 products are exact in fp64, so
  the result depends neither on the order of accumulation nor on how a weight is sharded.

With block scales, the operands are dequantized to bf16 for a bf16 result, and to fp64 for others.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from fp8_dist.kernels.block_gemm import block_scaled_mm, dequantize_blocks
from fp8_dist.kernels.blocks import NAN_EXPONENT
from fp8_dist.kernels.cpu.upcast import UpcastCache, upcast
from fp8_dist.kernels.gemm import apply_scales, scaled_mm, scaled_mm_with

_LARGEST = torch.finfo(torch.float32).max
_UNUSED = torch.zeros((), dtype=torch.bfloat16, device="cpu")

Upcast = Callable[[Tensor, torch.dtype], Tensor]


def _emulated(
    upcast_left: Upcast,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    if out_dtype is torch.bfloat16:
        wide = torch.bfloat16
        if scale_a.ndim == scale_b.ndim == 0:
            alpha = scale_a.item() * scale_b.item()
            # addmm keeps alpha in fp32, which the product of large scales may exceed.
            if not _LARGEST < alpha < math.inf:
                # With beta=0 the first argument is ignored. Alpha scales the fp32 accumulator.
                left, right = upcast_left(a, wide), upcast(b, wide)
                return torch.addmm(_UNUSED, left, right, beta=0, alpha=alpha)
        elif _are_powers_of_2(scale_a) and _are_powers_of_2(scale_b):
            left = _without_nan(upcast_left(a, wide), scale_a)
            right = _without_nan(upcast(b, wide), scale_b)
            product = torch.mm(left, right).to(torch.float32)
            return apply_scales(product, scale_a, scale_b).to(torch.bfloat16)
    product = torch.mm(upcast_left(a, torch.float64), upcast(b, torch.float64))
    return apply_scales(product, scale_a, scale_b).to(out_dtype)


def _without_nan(x: Tensor, scale: Tensor) -> Tensor:
    """Replace values by zeros if a non-finite scale makes their product NaN anyway.

    In torch's bf16 GEMM a NaN also reaches the previous row, unless the number of values in a row
    is a multiple of 32.
    """
    finite = scale.isfinite()
    return x if finite.all() else x.masked_fill(~finite, 0)


def _are_powers_of_2(scale: Tensor) -> bool:
    """Return whether all finite scales are normal powers of two."""
    bits = torch.nan_to_num(scale, 1.0, 1.0).view(torch.int32)
    return not bits.bitwise_and(0x7FFFFF).any()  # mantissa bits


def _block_scaled_mm(
    a: Tensor,
    b: Tensor,
    exponents_a: Tensor,
    exponents_b: Tensor,
    blocks_a: Sequence[int],
    blocks_b: Sequence[int],
    out_dtype: torch.dtype,
    emulate: bool,
) -> Tensor:
    wide = torch.bfloat16 if out_dtype is torch.bfloat16 else torch.float64
    nan_rows = _lines_of_nan(exponents_a, blocks_a, a.shape, 0)
    nan_columns = _lines_of_nan(exponents_b, blocks_b, b.shape, 1)
    left = dequantize_blocks(a, exponents_a, blocks_a, wide)
    right = dequantize_blocks(b, exponents_b, blocks_b, wide)
    # Zeros in place of NaN, as in _without_nan.
    if nan_rows is not None:
        left = left.masked_fill(nan_rows.unsqueeze(1), 0)
    if nan_columns is not None:
        right = right.masked_fill(nan_columns, 0)
    autocast = torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", enabled=False) if autocast else nullcontext():
        product = torch.mm(left, right)
    if nan_rows is not None:
        product.masked_fill_(nan_rows.unsqueeze(1), math.nan)
    if nan_columns is not None:
        product.masked_fill_(nan_columns, math.nan)
    return product.to(out_dtype)


def _lines_of_nan(
    exponents: Tensor, blocks: Sequence[int], shape: Sequence[int], dim: int
) -> Tensor | None:
    """Return a mask of the rows (dim 0) or columns (dim 1) with a NaN block; None without any."""
    is_nan = exponents == NAN_EXPONENT
    if not is_nan.any():
        return None
    lines = is_nan.any(1 - dim).repeat_interleave(blocks[dim])
    return lines.narrow(0, blocks[2 + dim], shape[dim])


# Only left operands are cached. In the GEMMs of output and grad_input the right operand is the
# weight. FSDP2 refills its storage without a new version, so a cached copy would be stale.
left_upcasts = UpcastCache()

scaled_mm.register(
    "cpu",
    partial(scaled_mm_with, partial(_emulated, upcast)),
    direct=partial(scaled_mm_with, partial(_emulated, left_upcasts.upcast)),
)
block_scaled_mm.register("cpu", _block_scaled_mm)
