"""Cast of float8 data to blocks of a column, for the GEMM that contracts the rows."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.blocks import exponents_shape
from fp8_dist.kernels.cuda.triton.block_tiles import (
    exponents_of,
    largest_of_each,
    multipliers_by,
    scales_by,
    spread,
)
from fp8_dist.kernels.cuda.triton.launch import (
    Blocks,
    blocks,
    float8_constants,
    programs,
    size_class,
    tuned,
)
from fp8_dist.kernels.cuda.triton.rounding import (
    from_float8,
    indices,
    magnitude,
    saturated,
    to_float8,
)


@tuned(
    blocks(8, BM=128, BN=64),
    blocks(4, BM=64, BN=64),
    blocks(8, BM=64, BN=128),
    blocks(8, BM=128, BN=128),
)
@triton.jit
def _reblock(
    x: tl.tensor,
    exponents: tl.tensor,
    qdata: tl.tensor,
    found: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    first_row: tl.tensor,
    first_column: tl.tensor,
    stride_m: tl.tensor,
    stride_k: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NEW_ROWS: tl.constexpr,
    RULE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN], or of a block, new or old, where that is larger. Moves 2
    # bytes per element.
    TILE_M: tl.constexpr = BM if BM > NEW_ROWS else NEW_ROWS
    TILE_N: tl.constexpr = BN if BN > COLUMNS else COLUMNS
    i = indices(tl.program_id(0), TILE_M)
    j = indices(tl.program_id(1), TILE_N) - first_column
    mask = (i < M)[:, None] & ((j >= 0) & (j < K))[None, :]
    code = tl.load(x + i[:, None] * stride_m + j[None, :] * stride_k, mask=mask, other=0)
    across = tl.cdiv(first_column + K, COLUMNS)
    c = indices(tl.program_id(1), TILE_N // COLUMNS)
    old = exponents + ((first_row + i) // ROWS)[:, None] * across + c[None, :]
    old = tl.load(old, mask=(i < M)[:, None] & (c < across)[None, :], other=127).to(tl.int32)
    v = from_float8(code, BIAS, SOFT) * spread(scales_by(old), 1, COLUMNS)
    new = exponents_of(largest_of_each(magnitude(v), NEW_ROWS, 1), RULE, BIAS)
    r = indices(tl.program_id(0), TILE_M // NEW_ROWS)
    is_block = (r < tl.cdiv(M, NEW_ROWS))[:, None] & ((j >= 0) & (j < K))[None, :]
    tl.store(found + r[:, None] * K + j[None, :], new.to(tl.uint8), mask=is_block)
    v = saturated(v * spread(multipliers_by(new), NEW_ROWS, 1), BIAS)
    code = to_float8(v, BIAS, SOFT)
    if TRANSPOSED:
        tl.store(qdata + j[:, None] * M + i[None, :], tl.trans(code), mask=tl.trans(mask))
    else:
        tl.store(qdata + i[:, None] * K + j[None, :], code, mask=mask)


def reblock(
    qdata: torch.Tensor,
    exponents: torch.Tensor,
    blocks: Sequence[int],
    rows: int,
    rule: str | None,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fp8_dist.kernels.reblock`.

    Args:
        qdata: float8, ``[M, K]``, any strides.
        exponents: exponents of its blocks.
        blocks: see :mod:`fp8_dist.kernels.blocks`; the sizes of a block are powers of two.
        rows: number of rows of the new blocks, a power of two.
        rule: rule of the new exponents.
        transposed: write ``[K, M]``.

    One launch; 2 bytes per element.
    """
    (M, K), (old_rows, columns, first_row, first_column) = qdata.shape, blocks
    device = qdata.device
    shape = exponents_shape(qdata.shape, (rows, 1, 0, 0))
    found = torch.empty(shape, dtype=torch.uint8, device=device)
    result = torch.empty((K, M) if transposed else (M, K), dtype=qdata.dtype, device=device)
    if not qdata.numel():
        return result, found

    def grid(chosen: Blocks) -> tuple[int, ...]:
        down = programs(M, max(rows, chosen["BM"]))
        return down, programs(first_column + K, max(columns, chosen["BN"]))

    _reblock(
        grid,
        (size_class(M, K), qdata.stride(1) == 1, old_rows, columns, rows, transposed),
        device,
        *(qdata.view(torch.uint8), exponents.contiguous(), result.view(torch.uint8), found),
        *(M, K, first_row, first_column, *qdata.stride()),
        ROWS=old_rows,
        COLUMNS=columns,
        NEW_ROWS=rows,
        RULE=rule,
        TRANSPOSED=transposed,
        **float8_constants(qdata.dtype, device),
    )
    return result, found
