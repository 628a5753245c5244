"""Casts of operands with block scales to other blocks."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.blocks import empty_reblocked, reblock
from fp8_dist.kernels.cuda.triton import launch, rounding
from fp8_dist.kernels.cuda.triton.blocks import exponents_of_codes, multipliers_by, takes_size
from fp8_dist.kernels.cuda.triton.launch import BlockSizes


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b)


# Larger tiles spill registers with Triton 3.6.
@launch.tuned(launch.blocks(2, BM=64, BN=64), launch.blocks(2, BM=64, BN=32))
@triton.jit
def _reblock(
    x: tl.tuple,
    exponents: tl.tuple,
    qdata: tl.tensor,
    new_exponents: tl.tensor,
    first_row: tl.tensor,
    first_column: tl.tensor,
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
    # One instance: a tile of [BM, BN], enlarged to whole new blocks. Moves 2 bytes per element. The
    # dims of the tile are [q, k, r, c, n, w]: row q + Q * k of new block r, and column w + W * n of
    # old block c. A thread loads W columns of Q rows. So it finds the maxima of few columns, mostly
    # by itself, and stores Q rows of a column together if the data are transposed.
    Q: tl.constexpr = 16 if NEW_ROWS > 16 else NEW_ROWS
    R: tl.constexpr = BM // NEW_ROWS if BM > NEW_ROWS else 1
    WIDTH: tl.constexpr = BN if BN < COLUMNS else COLUMNS
    W: tl.constexpr = 4 if WIDTH > 4 else WIDTH
    C: tl.constexpr = BN // WIDTH
    data, M, K, stride_m, stride_k = x
    scales, _, across, stride_r, stride_c = exponents
    # The first row and column of the tile, and those of its elements.
    m, first = tl.cast(tl.program_id(0), tl.int64) * (R * NEW_ROWS), tl.program_id(1) * BN
    k = tl.cast(first - first_column, tl.int64)
    q, r, c = tl.arange(0, Q)[:, None, None], tl.arange(0, R), tl.arange(0, C)
    row = q + Q * tl.arange(0, NEW_ROWS // Q)[:, None] + NEW_ROWS * r
    j = WIDTH * c[:, None, None] + W * tl.arange(0, WIDTH // W)[:, None] + tl.arange(0, W)
    # How many rows and columns are left, as int32.
    rows, columns = tl.minimum(M - m, R * NEW_ROWS).to(tl.int32), tl.minimum(K - k, BN).to(tl.int32)
    is_column = (j >= first_column - first) & (j < columns)
    i = row[:, :, :, None, None, None]
    is_element = (i < rows) & is_column
    data += m * stride_m + k * stride_k
    data += tl.cast(i, tl.int64) * stride_m + tl.cast(j, tl.int64) * stride_k
    code = tl.load(data, mask=is_element, other=0)
    row, c = row[:, :, :, None], first // COLUMNS + c
    old_exponents = scales + (first_row + m + row) // ROWS * stride_r + c * stride_c
    old = tl.load(old_exponents, mask=(row < rows) & (c < across), other=127).to(tl.int32)
    # A scale of NaN becomes infinity here. The new scale is then NaN.
    old = tl.maximum(old << 23, 0x400000).to(tl.float32, bitcast=True)
    v = rounding.from_float8(code, BIAS, SOFT) * old[:, :, :, :, None, None]
    # Maxima of each thread, then of each block: as bytes, which cause no bank conflicts.
    new = exponents_of_codes(tl.max(rounding.magnitude(v), 0), RULE, BIAS).to(tl.uint8)
    new = tl.reduce(new, 0, _larger).to(tl.int32)
    r = r[:, None, None, None]
    new_exponents += (m // NEW_ROWS + r) * K + k + j
    tl.store(new_exponents, new.to(tl.uint8), mask=(r * NEW_ROWS < rows) & is_column)
    v = v * multipliers_by(new)
    if RULE == "floor":
        v = rounding.saturated(v, BIAS)
    code = rounding.to_float8(v, BIAS, SOFT)
    if TRANSPOSED:
        stride, rows = tl.cdiv(M, NEW_ROWS) * NEW_ROWS, tl.cdiv(rows, NEW_ROWS) * NEW_ROWS
        places, mask = (k + j) * stride + m + i, (i < rows) & is_column
        places, mask = tl.permute(places, 3, 4, 5, 2, 1, 0), tl.permute(mask, 3, 4, 5, 2, 1, 0)
        tl.store(qdata + places, tl.permute(code, 3, 4, 5, 2, 1, 0), mask=mask)
    else:
        tl.store(qdata + (m + i) * K + k + j, code, mask=is_element)


@launch.fused(
    reblock,
    lambda qdata, exponents, blocks, rows, *_, **__: (
        takes_size(*blocks[:2]) and takes_size(rows, blocks[1])
    ),
)
def _reblocked(
    qdata: torch.Tensor,
    exponents: torch.Tensor,
    blocks: Sequence[int],
    rows: int,
    rule: str | None,
    transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast to other blocks in one launch; 2 bytes per element."""
    (M, K), (old_rows, columns, first_row, first_column) = qdata.shape, blocks
    data, new_exponents = empty_reblocked(qdata, rows, transposed)

    def grid(chosen: BlockSizes) -> tuple[int, ...]:
        down = launch.programs(M, max(rows, chosen["BM"]))
        return down, launch.programs(first_column + K, chosen["BN"])

    if qdata.numel():
        _reblock(
            grid,
            *(launch.matrix(qdata), launch.matrix(exponents), launch.raw(data), new_exponents),
            *(first_row, first_column),
            ROWS=old_rows,
            COLUMNS=columns,
            NEW_ROWS=rows,
            RULE=rule,
            TRANSPOSED=transposed,
            **launch.float8_constants(qdata.dtype, qdata.device),
        )
    return data, new_exponents
