"""Kernels for CPUs, which have no float8 arithmetic: exact and fast emulation.

Importing this module registers implementations of the operators of :mod:`fp8_dist.kernels`.
Amaxes, scales and casts have the same bits as in the portable implementations. The GEMMs are more
exact.

*Conversions.* torch converts float8 to bf16 one element at a time. It is faster to move the sign
and the 7 other bits of a float8 number to their places in a bf16 number. The mantissa is then
right, and the exponent is off by a constant. One multiplication corrects it, in subnormal numbers
too. torch's own conversion is used for data with NaN or inf, and for all data if this thread
flushes subnormal numbers (``torch.set_flush_denormal``).

*Casts.* A single amax and a single scale are computed as Python numbers, which are fp64 as in the
formula. Operators on one-element tensors cost more, and would take most of the time of a small
layer.

*GEMMs.* Float8 data is exact in bf16, and so are its products in fp32.

* bf16 output, one scale for each operand: a bf16 GEMM of the upcast data, which accumulates in
  fp32, with the product of the scales as its alpha. It rounds once, at the end.
* bf16 output, power-of-two scales of rows and columns: a bf16 GEMM, whose result is scaled. This is
  as exact, because scaling by a power of two does not round.
* fp32 and fp16 output, and other scales: an fp64 GEMM. Sums of e4m3 products are exact in fp64, so
  the result depends neither on the order of accumulation nor on how a weight is sharded.

With block scales, the operands are dequantized to bf16 for a bf16 result, and to fp64 for others.

On a CPU without bf16 instructions, a bf16 GEMM takes 2 to 50 times as long as an fp64 GEMM, so an
fp64 GEMM replaces it. An fp32 GEMM does so where sums may be rounded in any order, as in gradients:
it takes half of fp64's time, but its order of accumulation depends on the shape.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from struct import Struct

import torch
from torch import Tensor

from fp8_dist.kernels.blocks import NAN_EXPONENT, dequantize_blocks
from fp8_dist.kernels.gemm import apply_scales, block_scaled_mm, scaled_mm
from fp8_dist.kernels.quantization import cast_copies, cast_fresh, quantize
from fp8_dist.kernels.scale import EPS, Scaling, amax, magnitudes, scaling_from_amax
from fp8_dist.torch_internals import has_bf16_instructions

_FP32 = Struct("f")
_scalar = partial(torch.scalar_tensor, dtype=torch.float32, device="cpu")
_UNUSED = {d: torch.zeros((), dtype=d, device="cpu") for d in (torch.bfloat16, torch.float32)}
_SUBNORMAL = 5e-324
_FP32_MAX = torch.finfo(torch.float32).max

# Decided once, so that equal operands give equal bits.
_HAS_BF16 = has_bf16_instructions()

# Below this size torch's own conversion is faster than several passes.
FEW = 4096  # elements


# For each format: the shift of the 7 bits of a number to their place in a bf16 number; log2 of the
# correcting factor, which is 127 minus the exponent bias; the 7 bits of the largest finite number.
_FORMATS = {torch.float8_e4m3fn: (4, 120, 0x7E), torch.float8_e5m2: (5, 112, 0x7B)}


def upcast(qdata: Tensor, dtype: torch.dtype, is_finite: bool = False) -> Tensor:
    """Convert float8 data of any shape to bf16, fp32 or fp64, as ``qdata.to(dtype)`` does.

    Args:
        is_finite: all values are known to be finite.
    """
    if qdata.dtype is dtype:
        return qdata
    if qdata.numel() < FEW:
        # bfloat16() costs less than to(), and bf16 is the most frequent dtype.
        return qdata.bfloat16() if dtype is torch.bfloat16 else qdata.to(dtype)
    shift, exponent, last_finite = _FORMATS.get(qdata.dtype, (0, 0, 0))
    # Python flushes them where torch does, in this thread.
    flushes_subnormal_numbers = _SUBNORMAL * 1.0 == 0.0
    if not shift or flushes_subnormal_numbers or not (is_finite or _is_finite(qdata, last_finite)):
        # Through bf16, as below, so that both paths give a NaN the same bits.
        return qdata.bfloat16().to(dtype)
    # The conversion from int8 to int16 repeats the sign in all upper bits, so it is already in
    # bit 15. A multiplication is faster than a shift.
    bits = qdata.view(torch.int8).to(torch.int16).mul_(1 << shift)
    bits.bitwise_and_((0x7F << shift) - 0x8000)
    return bits.view(torch.bfloat16).mul_(2.0**exponent).to(dtype)


def _is_finite(qdata: Tensor, last: int) -> bool:
    """Return whether all values are finite, given the byte of the largest finite number."""
    if qdata.ndim == 2 and not qdata.is_contiguous():
        qdata = qdata.t()  # max would make a copy
    # Among signed bytes the positive values are the largest, among unsigned ones the negative ones.
    largest = qdata.view(torch.int8).max().item(), qdata.view(torch.uint8).max().item()
    return largest[0] <= last and largest[1] <= 0x80 + last


def _amax(x: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    reduces = dims is None or len(dims) > 0
    if not reduces or x.numel() == 0 or x.dtype is torch.float64:
        return amax.portable(x, dims)
    if dims is None:
        low, high = torch.aminmax(x)  # both are NaN if a value is NaN
        return _scalar(abs(max(-low.item(), high.item())))
    # torch finds the maximum along a dim faster for integers than for floats.
    largest = magnitudes(x).amax(tuple(dims), keepdim=True)
    return largest.view(x.dtype).to(torch.float32)


def _scaling_from_amax(
    amax: Tensor, dtype: torch.dtype, round_scales_to_power_of_2: bool = False
) -> Scaling:
    if amax.ndim or round_scales_to_power_of_2:
        return scaling_from_amax.portable(amax, dtype, round_scales_to_power_of_2)
    # Like torch, divide a number by the amax as a product with the reciprocal of the amax. Python's
    # max keeps a NaN in its first argument. The scale is rounded to fp64 and then to fp32, which
    # equals rounding once, because fp64 has more than twice the bits.
    (m,) = _FP32.unpack(_FP32.pack(1 / max(amax.item(), EPS) * torch.finfo(dtype).max))
    return _scalar(m), _scalar(1 / m if m else math.inf)


def _dequantize(x: Tensor, scales: Tensor, blocks: Sequence[int], dtype: torch.dtype) -> Tensor:
    return dequantize_blocks.portable(upcast(x, dtype), scales, blocks, dtype)


def gemm_dtype(out_dtype: torch.dtype, any_order: bool) -> torch.dtype:
    """Return the dtype in which the data of a GEMM is multiplied if its scales allow it.

    Sums are in fp32 for bf16. ``any_order``: see :func:`fp8_dist.kernels.gemm.scaled_mm`.
    """
    if out_dtype is not torch.bfloat16:
        return torch.float64
    if _HAS_BF16:
        return torch.bfloat16
    return torch.float32 if any_order else torch.float64


def _emulated(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, any_order: bool
) -> Tensor:
    wide = gemm_dtype(out_dtype, any_order)
    if wide is not torch.float64:
        if scale_a.ndim == scale_b.ndim == 0:
            alpha = scale_a.item() * scale_b.item()
            # addmm keeps alpha in fp32, which the product of large scales may exceed.
            if not _FP32_MAX < alpha < math.inf:
                # With beta=0 the first argument is ignored. Alpha scales the fp32 accumulator.
                left, right = upcast(a, wide), upcast(b, wide)
                product = torch.addmm(_UNUSED[wide], left, right, beta=0, alpha=alpha)
                return product if wide is out_dtype else product.to(out_dtype)
        elif _are_powers_of_2(scale_a) and _are_powers_of_2(scale_b):
            left = _without_nan(upcast(a, wide), scale_a)
            right = _without_nan(upcast(b, wide), scale_b)
            product = torch.mm(left, right).to(torch.float32)
            return apply_scales(product, scale_a, scale_b).to(out_dtype)
    product = torch.mm(upcast(a, torch.float64), upcast(b, torch.float64))
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
    scales_a: Tensor,
    scales_b: Tensor,
    blocks_a: Sequence[int],
    blocks_b: Sequence[int],
    out_dtype: torch.dtype,
    emulate: bool,
) -> Tensor:
    narrow = out_dtype is torch.bfloat16 and scales_a.dtype is torch.uint8
    wide = gemm_dtype(out_dtype, False) if narrow else torch.float64
    left, nan_rows = _without_nan_lines(a, scales_a, blocks_a, wide, 0)
    right, nan_columns = _without_nan_lines(b, scales_b, blocks_b, wide, 1)
    autocast = torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", enabled=False) if autocast else nullcontext():
        product = torch.mm(left, right)
    for lines in (nan_rows, nan_columns):
        if lines is not None:
            product.masked_fill_(lines, math.nan)
    return product.to(out_dtype)


def _without_nan_lines(
    x: Tensor, scales: Tensor, blocks: Sequence[int], dtype: torch.dtype, dim: int
) -> tuple[Tensor, Tensor | None]:
    """Dequantize a matrix, with zeros where a row (dim 0) or column (dim 1) has a non-finite scale.

    Zeros take the place of NaN as in :func:`_without_nan`.

    Returns:
        The values, and a mask of these rows or columns; None if there are none.
    """
    values = _dequantize(x, scales, blocks, dtype)
    is_nan = scales == NAN_EXPONENT if scales.dtype is torch.uint8 else ~scales.isfinite()
    if not is_nan.any():
        return values, None
    lines = is_nan.any(1 - dim).repeat_interleave(blocks[dim])
    lines = lines.narrow(0, blocks[2 + dim], x.shape[dim]).unsqueeze(1 - dim)
    return values.masked_fill(lines, 0), lines


# Operators within operators are called as plain functions, which takes less time.
_cast_copies = partial(cast_copies.portable, scaling=_scaling_from_amax, cast=quantize.portable)

amax.register("cpu", _amax)
cast_copies.register("cpu", _cast_copies)
cast_fresh.register("cpu", partial(cast_fresh.portable, measure=_amax, cast=_cast_copies))
scaling_from_amax.register("cpu", _scaling_from_amax)
dequantize_blocks.register("cpu", _dequantize)
scaled_mm.register("cpu", partial(scaled_mm.portable, emulated=_emulated))
block_scaled_mm.register("cpu", _block_scaled_mm)
