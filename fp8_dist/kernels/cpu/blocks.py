"""Block scales on CPUs: the bits of the portable implementations, in less time.

If the result is not bf16, the GEMM runs in fp64 and is more exact than the portable one.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from fp8_dist.kernels.block_gemm import block_scaled_mm, dequantized
from fp8_dist.kernels.blocks import NAN_EXPONENT, cast_columns_of_blocks, quantize_blocks, reblock
from fp8_dist.kernels.cpu.upcast import upcast

_PART = 65536  # elements, whose fp32 values fit into the CPU's cache


def _quantize_blocks(
    x: Tensor,
    exponents: Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    after: Tensor | None = None,
) -> Tensor:
    rows, _, first_row, _ = blocks
    if x.numel() <= _PART or first_row or (rows > 1 and x.ndim > 2):
        return quantize_blocks.portable(x, exponents, dtype, blocks)
    x = x.contiguous()
    matrix, qdata = x.view(-1, x.shape[-1]), torch.empty_like(x, dtype=dtype)
    results, numbers = qdata.view(matrix.shape), exponents.view(-1, exponents.shape[-1])
    for part, of_rows in _parts(matrix, rows):
        quantized = quantize_blocks.portable(matrix[part], numbers[of_rows], dtype, blocks)
        results[part] = quantized
    return qdata


def _reblock(
    qdata: Tensor,
    exponents: Tensor,
    blocks: Sequence[int],
    rows: int,
    rule: str | None,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    if qdata.numel() <= _PART or blocks[0] > 1 or transposed:
        return reblock.portable(qdata, exponents, blocks, rows, rule, transposed)
    result, found = torch.empty_like(qdata), []
    for part, _ in _parts(qdata, rows):  # blocks of one row: each row has a row of exponents
        values = dequantized(qdata[part], exponents[part], blocks, torch.float32, upcast)
        result[part], numbers = cast_columns_of_blocks(values, qdata.dtype, rows, rule)
        found.append(numbers)
    return result, torch.cat(found)


def _parts(matrix: Tensor, rows: int) -> Iterator[tuple[slice, slice]]:
    """Slices of rows that hold whole blocks, and the slices of their exponents."""
    count = max(1, _PART // (rows * matrix.shape[1]))  # blocks
    for first in range(0, -(-len(matrix) // rows), count):
        yield slice(first * rows, (first + count) * rows), slice(first, first + count)


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
    left = dequantized(a, exponents_a, blocks_a, wide, upcast)
    right = dequantized(b, exponents_b, blocks_b, wide, upcast)
    # In torch's bf16 GEMM a NaN also reaches the previous row, unless rows have a multiple of 32
    # values.
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
    """Mask of the rows (dim 0) or columns with a NaN block; None if there is no such block."""
    is_nan = exponents == NAN_EXPONENT
    if not is_nan.any():
        return None
    lines = is_nan.any(1 - dim).repeat_interleave(blocks[dim])
    return lines.narrow(0, blocks[2 + dim], shape[dim])


quantize_blocks.register("cpu", _quantize_blocks)
reblock.register("cpu", _reblock)
block_scaled_mm.register("cpu", _block_scaled_mm)
