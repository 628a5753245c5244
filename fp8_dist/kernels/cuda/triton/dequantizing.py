"""Float8 data with block scales as bf16 or fp32, for devices without a GEMM for such blocks."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton.block_tiles import scales_by, spread
from fp8_dist.kernels.cuda.triton.launch import (
    blocks as sizes,
)
from fp8_dist.kernels.cuda.triton.launch import float8_constants, programs, size_class, tuned
from fp8_dist.kernels.cuda.triton.rounding import from_float8, indices


@triton.jit
def _bf16_bits(v: tl.tensor) -> tl.tensor:
    # Round to nearest even with integers, because the interpreter's conversion changes subnormals.
    bits = v.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.int16)


@tuned(sizes(4, BM=32, BN=128), sizes(8, BM=64, BN=128), sizes(8, BM=32, BN=256))
@triton.jit
def _dequantize(
    x: tl.tensor,
    exponents: tl.tensor,
    out: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    first_row: tl.tensor,
    first_column: tl.tensor,
    stride_m: tl.tensor,
    stride_k: tl.tensor,
    exponents_m: tl.tensor,
    exponents_k: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NARROW: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN], or of a block where that is wider. Moves 3 bytes per
    # element, 5 for fp32.
    TILE_N: tl.constexpr = BN if BN > COLUMNS else COLUMNS
    i = indices(tl.program_id(0), BM)
    j = indices(tl.program_id(1), TILE_N) - first_column
    mask = (i < M)[:, None] & ((j >= 0) & (j < K))[None, :]
    code = tl.load(x + i[:, None] * stride_m + j[None, :] * stride_k, mask=mask, other=0)
    c = indices(tl.program_id(1), TILE_N // COLUMNS)
    r = (first_row + i) // ROWS
    is_block = (i < M)[:, None] & (c < tl.cdiv(first_column + K, COLUMNS))[None, :]
    found = exponents + r[:, None] * exponents_m + c[None, :] * exponents_k
    found = tl.load(found, mask=is_block, other=127).to(tl.int32)
    v = from_float8(code, BIAS, SOFT) * spread(scales_by(found), 1, COLUMNS)
    if NARROW:
        v = _bf16_bits(v)
    tl.store(out + i[:, None] * K + j[None, :], v, mask=mask)


def dequantize(
    qdata: torch.Tensor, exponents: torch.Tensor, blocks: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """:func:`fp8_dist.kernels.block_gemm.dequantized`: bf16 or fp32, in the layout of the data.

    One launch; 3 bytes per element for bf16, 5 for fp32.
    """
    rows, columns, first_row, first_column = blocks
    if not qdata.is_contiguous() and qdata.t().is_contiguous():
        turned = columns, rows, first_column, first_row
        return dequantize(qdata.t(), exponents.t(), turned, dtype).t()
    M, K = qdata.shape
    out = torch.empty(M, K, dtype=dtype, device=qdata.device)
    narrow = dtype is torch.bfloat16
    assert narrow or dtype is torch.float32
    if not qdata.numel():
        return out
    _dequantize(
        lambda chosen: (
            programs(M, chosen["BM"]),
            programs(first_column + K, max(columns, chosen["BN"])),
        ),
        (size_class(M, K), qdata.stride(1) == 1, rows, columns, narrow),
        qdata.device,
        *(qdata.view(torch.uint8), exponents, out.view(torch.int16) if narrow else out),
        *(M, K, first_row, first_column, *qdata.stride(), *exponents.stride()),
        ROWS=rows,
        COLUMNS=columns,
        NARROW=narrow,
        **float8_constants(qdata.dtype, qdata.device),
    )
    return out
