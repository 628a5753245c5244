"""Casts with block scales, one launch each, by computed or given exponents."""

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.blocks import exponents_shape
from fp8_dist.kernels.cuda.results import BlockCast, Layouts
from fp8_dist.kernels.cuda.triton.block_tiles import cast_tile
from fp8_dist.kernels.cuda.triton.launch import Blocks as Sizes
from fp8_dist.kernels.cuda.triton.launch import (
    as_float8,
    blocks,
    empty_bytes,
    float8_constants,
    programs,
    size_class,
    tuned,
)


@tuned(
    blocks(4, BM=32, BN=128),
    blocks(8, BM=32, BN=256),
    blocks(8, BM=64, BN=128),
    blocks(8, BM=128, BN=64),
    blocks(8, BM=128, BN=128),
)
@triton.jit
def _cast_blocks(
    x: tl.tensor,
    exponents: tl.tensor,
    qdata: tl.tensor,
    qdata_t: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    first_row: tl.tensor,
    first_column: tl.tensor,
    stride_m: tl.tensor,
    stride_k: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GIVEN: tl.constexpr,
    RULE: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
    COLUMN_MAJOR: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN], or of a block where that is larger. Moves the bytes of x
    # once, and 1 byte per element and layout.
    TILE_M: tl.constexpr = BM if BM > ROWS else ROWS
    TILE_N: tl.constexpr = BN if BN > COLUMNS else COLUMNS
    cast_tile(
        x,
        exponents,
        qdata,
        qdata_t,
        tl.program_id(0),
        tl.program_id(1),
        M,
        K,
        first_row,
        first_column,
        stride_m,
        stride_k,
        ROWS,
        COLUMNS,
        GIVEN,
        RULE,
        ROW_MAJOR,
        COLUMN_MAJOR,
        BIAS,
        SOFT,
        TILE_M,
        TILE_N,
    )


@tuned(
    blocks(4, BM=32, BN=128),
    blocks(8, BM=32, BN=256),
    blocks(8, BM=64, BN=128),
    blocks(8, BM=128, BN=128),
)
@triton.jit
def _block_exponents(
    x: tl.tensor,
    exponents: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    first_row: tl.tensor,
    first_column: tl.tensor,
    stride_m: tl.tensor,
    stride_k: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RULE: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: as in _cast_blocks. Moves the bytes of x once.
    cast_tile(
        x,
        exponents,
        None,
        None,
        tl.program_id(0),
        tl.program_id(1),
        M,
        K,
        first_row,
        first_column,
        stride_m,
        stride_k,
        ROWS,
        COLUMNS,
        False,
        RULE,
        False,
        False,
        BIAS,
        SOFT,
        BM if BM > ROWS else ROWS,
        BN if BN > COLUMNS else COLUMNS,
    )


def cast_blocks(
    x: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    rule: str | None,
    *,
    row_major: bool = True,
    column_major: bool = False,
) -> BlockCast:
    """Compute the block exponents of a matrix and cast it to float8.

    Args:
        x: ``[M, K]``, bf16, fp16 or fp32, any strides.
        dtype: a float8 dtype.
        blocks: see :mod:`fp8_dist.kernels.blocks`; the sizes of a block are powers of two.
        rule: see :mod:`fp8_dist.kernels.blocks`.
        row_major: whether to write ``qdata``.
        column_major: whether to write ``qdata_t``.

    One launch; 3 bytes per bf16 element, 4 for both layouts.
    """
    exponents = _empty_exponents(x, blocks)
    return BlockCast(
        *_launch(x, exponents, dtype, blocks, False, rule, row_major, column_major), exponents
    )


def block_exponents(
    x: torch.Tensor, dtype: torch.dtype, blocks: Sequence[int], rule: str | None
) -> torch.Tensor:
    """:func:`fp8_dist.kernels.block_exponents` of a matrix. One launch; 2 bytes per bf16 element.

    Arguments are as in :func:`cast_blocks`.
    """
    (M, K), (rows, columns, first_row, first_column) = x.shape, blocks
    exponents = _empty_exponents(x, blocks)
    if exponents.numel():
        _block_exponents(
            partial(_grid, x.shape, blocks),
            (x.dtype, size_class(M, K), x.stride(1) == 1, rows, columns),
            x.device,
            *(x, exponents, M, K, first_row, first_column, *x.stride()),
            ROWS=rows,
            COLUMNS=columns,
            RULE=rule,
            **float8_constants(dtype, x.device),
        )
    return exponents


def quantize_blocks(
    x: torch.Tensor,
    exponents: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    *,
    row_major: bool = True,
    column_major: bool = False,
) -> Layouts:
    """:func:`fp8_dist.kernels.quantize_blocks` of a matrix, in one layout or both.

    Arguments are as in :func:`cast_blocks`. One launch; 3 bytes per bf16 element, 4 for both
    layouts.
    """
    exponents = exponents.contiguous()
    return Layouts(*_launch(x, exponents, dtype, blocks, True, None, row_major, column_major))


def _launch(
    x: torch.Tensor,
    exponents: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    given: bool,
    rule: str | None,
    row_major: bool,
    column_major: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    (M, K), (rows, columns, first_row, first_column) = x.shape, blocks
    qdata = empty_bytes(row_major, x, M, K)
    qdata_t = empty_bytes(column_major, x, K, M)
    if not x.numel():
        return as_float8(qdata, dtype), as_float8(qdata_t, dtype)
    _cast_blocks(
        partial(_grid, x.shape, blocks),
        (x.dtype, size_class(M, K), x.stride(1) == 1, rows, columns, row_major, column_major),
        x.device,
        *(x, exponents, qdata, qdata_t, M, K, first_row, first_column, *x.stride()),
        ROWS=rows,
        COLUMNS=columns,
        GIVEN=given,
        RULE=rule,
        ROW_MAJOR=row_major,
        COLUMN_MAJOR=column_major,
        **float8_constants(dtype, x.device),
    )
    return as_float8(qdata, dtype), as_float8(qdata_t, dtype)


def _empty_exponents(x: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    return torch.empty(exponents_shape(x.shape, blocks), dtype=torch.uint8, device=x.device)


def _grid(shape: Sequence[int], blocks: Sequence[int], chosen: Sizes) -> tuple[int, int]:
    """Grid with one instance for each tile of whole blocks."""
    (M, K), (rows, columns, first_row, first_column) = shape, blocks
    down = programs(first_row + M, max(rows, chosen["BM"]))
    return down, programs(first_column + K, max(columns, chosen["BN"]))
