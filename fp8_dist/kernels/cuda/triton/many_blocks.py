"""Block exponents of many matrices in one launch, and their casts in another.

The kernels find the matrices in a table, as in :mod:`fp8_dist.kernels.cuda.triton.many`.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.blocks import exponents_shape
from fp8_dist.kernels.cuda.triton.block_tiles import cast_tile
from fp8_dist.kernels.cuda.triton.blocks import block_exponents, quantize_blocks
from fp8_dist.kernels.cuda.triton.launch import Tuned, float8_constants, programs, size_class, tuned
from fp8_dist.kernels.cuda.triton.launch import blocks as sizes
from fp8_dist.kernels.cuda.triton.many import (
    TRITON,
    addresses_of,
    are_aligned,
    is_capturing,
    starts_of,
    table_on,
)


@tuned(
    sizes(4, BM=32, BN=128),
    sizes(8, BM=32, BN=256),
    sizes(8, BM=64, BN=128),
    sizes(8, BM=128, BN=128),
)
@triton.jit
def _exponents_of_many(
    table: tl.tensor,
    exponents: tl.tensor,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RULE: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: every SPLITS-th tile of one matrix. The table has its address, its sizes, its
    # position within its first block, and the index of its first exponent. Moves the bytes of all
    # matrices once.
    TILE_M: tl.constexpr = BM if BM > ROWS else ROWS
    TILE_N: tl.constexpr = BN if BN > COLUMNS else COLUMNS
    entry = table + 6 * tl.program_id(0)
    x = tl.load(entry).to(tl.pointer_type(DTYPE))
    M, K = tl.load(entry + 1), tl.load(entry + 2)
    first_row, first_column = tl.load(entry + 3), tl.load(entry + 4)
    if ALIGNED:
        x = tl.multiple_of(x, 16)
        K = tl.multiple_of(K, 16)
        first_column = tl.multiple_of(first_column, 16)
    across = tl.cdiv(first_column + K, TILE_N)
    for tile in range(tl.program_id(1), tl.cdiv(first_row + M, TILE_M) * across, SPLITS):
        cast_tile(
            x,
            exponents + tl.load(entry + 5),
            None,
            None,
            tile // across,
            tile % across,
            M,
            K,
            first_row,
            first_column,
            K,
            1,
            ROWS,
            COLUMNS,
            False,
            RULE,
            False,
            False,
            BIAS,
            SOFT,
            TILE_M,
            TILE_N,
        )


@tuned(
    sizes(4, BM=32, BN=128),
    sizes(8, BM=32, BN=256),
    sizes(8, BM=64, BN=128),
    sizes(8, BM=128, BN=128),
)
@triton.jit
def _cast_many_blocks(
    table: tl.tensor,
    exponents: tl.tensor,
    out: tl.tensor,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: as in _exponents_of_many; the table also has the index of the first byte in out.
    # Moves the bytes of all matrices once, and 1 byte per element.
    TILE_M: tl.constexpr = BM if BM > ROWS else ROWS
    TILE_N: tl.constexpr = BN if BN > COLUMNS else COLUMNS
    entry = table + 7 * tl.program_id(0)
    x = tl.load(entry).to(tl.pointer_type(DTYPE))
    M, K = tl.load(entry + 1), tl.load(entry + 2)
    first_row, first_column = tl.load(entry + 3), tl.load(entry + 4)
    start = tl.load(entry + 6)
    if ALIGNED:
        x = tl.multiple_of(x, 16)
        K = tl.multiple_of(K, 16)
        first_column = tl.multiple_of(first_column, 16)
        start = tl.multiple_of(start, 16)
    across = tl.cdiv(first_column + K, TILE_N)
    for tile in range(tl.program_id(1), tl.cdiv(first_row + M, TILE_M) * across, SPLITS):
        cast_tile(
            x,
            exponents + tl.load(entry + 5),
            out + start,
            None,
            tile // across,
            tile % across,
            M,
            K,
            first_row,
            first_column,
            K,
            1,
            ROWS,
            COLUMNS,
            True,
            False,
            True,
            False,
            BIAS,
            SOFT,
            TILE_M,
            TILE_N,
        )


def exponents_of_many(
    matrices: Sequence[torch.Tensor],
    dtype: torch.dtype,
    blocks: Sequence[Sequence[int]],
    rule: str | None,
) -> torch.Tensor:
    """:func:`fp8_dist.kernels.block_exponents` of many contiguous matrices of one dtype and device.

    Args:
        matrices: ``[M, K]``, bf16, fp16 or fp32.
        dtype: a float8 dtype.
        blocks: blocks of each matrix, whose sizes are the same powers of two.
        rule: see :mod:`fp8_dist.kernels.blocks`.

    Returns:
        The exponents of all matrices, uint8, flat, one matrix after the other.

    One launch; 2 bytes per bf16 element. The matrices' addresses are copied to the device, and the
    host waits for the copy, unless they are the same as in recent calls. While a CUDA graph is
    captured, the matrices are processed one by one, because the graph would outlive the addresses.
    """
    device = matrices[0].device
    if is_capturing(device):
        each = zip(matrices, blocks, strict=True)
        return torch.cat([block_exponents(x, dtype, of, rule).view(-1) for x, of in each])
    counts = _counts(matrices, blocks)
    exponents = torch.empty(sum(counts), dtype=torch.uint8, device=device)
    columns = [*_columns(matrices, blocks), starts_of(counts)]
    _launch(_exponents_of_many, matrices, blocks, columns, dtype, exponents, RULE=rule)
    return exponents


def quantize_many_blocks(
    matrices: Sequence[torch.Tensor],
    exponents: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[Sequence[int]],
) -> torch.Tensor:
    """:func:`fp8_dist.kernels.quantize_blocks` of many matrices, flat, one after the other.

    Args:
        exponents: uint8, contiguous, flat.

    Other arguments are as in :func:`exponents_of_many`, and so are the copy of the addresses and
    the capture of CUDA graphs. One launch; 3 bytes per bf16 element.
    """
    device, counts = matrices[0].device, _counts(matrices, blocks)
    starts = starts_of([x.numel() for x in matrices])
    out = torch.empty(sum(x.numel() for x in matrices), dtype=dtype, device=device)
    if is_capturing(device):
        parts = exponents.split(counts)
        for x, mine, of, start in zip(matrices, parts, blocks, starts, strict=True):
            mine = mine.view(exponents_shape(x.shape, of))
            qdata = quantize_blocks(x, mine, dtype, of).qdata
            assert qdata is not None
            out[start : start + x.numel()].copy_(qdata.view(-1))
        return out
    columns = [*_columns(matrices, blocks), starts_of(counts), starts]
    _launch(_cast_many_blocks, matrices, blocks, columns, dtype, exponents, out.view(torch.uint8))
    return out


def _counts(matrices: Sequence[torch.Tensor], blocks: Sequence[Sequence[int]]) -> list[int]:
    each = zip(matrices, blocks, strict=True)
    return [math.prod(exponents_shape(x.shape, of)) for x, of in each]


def _columns(matrices: Sequence[torch.Tensor], blocks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Columns of a table: addresses, sizes, and positions of matrices within their first blocks."""
    rows = [
        (*x.shape, *of[2:]) if x.numel() else (0, 0, 0, 0)
        for x, of in zip(matrices, blocks, strict=True)
    ]
    return [addresses_of(matrices), *map(list, zip(*rows, strict=True))]


def _launch(
    kernel: Tuned,
    matrices: Sequence[torch.Tensor],
    blocks: Sequence[Sequence[int]],
    columns: list[list[int]],
    dtype: torch.dtype,
    *args: torch.Tensor,
    **constants: str | None,
) -> None:
    device, of, (rows, across, *_) = matrices[0].device, matrices[0].dtype, blocks[0]
    addresses, _, K, _, first_column, _, *starts = columns
    largest = max(x.numel() for x in matrices)
    splits = min(256, programs(largest, 2**15))
    kernel(
        lambda chosen: (len(matrices), splits),
        (of, size_class(len(matrices), largest), rows, across),
        device,
        *(table_on(device, *columns), *args),
        DTYPE=TRITON[of],
        ALIGNED=are_aligned(addresses, K, first_column, *starts),
        ROWS=rows,
        COLUMNS=across,
        SPLITS=splits,
        **constants,
        **float8_constants(dtype, device),
    )
