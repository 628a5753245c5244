"""Operands of GEMMs with block scales: casts to other blocks, and layouts of scales."""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.blocks import empty_reblocked, reblock
from fp8_dist.kernels.cuda.triton.blocks import (
    exponents_of_codes,
    multipliers_by,
    scales_by,
    takes_size,
)
from fp8_dist.kernels.cuda.triton.launch import (
    Blocks,
    as_bytes,
    blocks,
    float8_constants,
    fused,
    matrix,
    programs,
    tuned,
)
from fp8_dist.kernels.cuda.triton.rounding import (
    from_float8,
    indices,
    magnitude,
    saturated,
    to_float8,
)
from fp8_dist.kernels.gemm import gemm_scales, tiled_exponents
from fp8_dist.kernels.quantization import rounded_up


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b)


# Larger tiles spill registers with Triton 3.6.
@tuned(blocks(2, BM=64, BN=64), blocks(1, BM=64, BN=32))
@triton.jit
def _reblock(
    x: tl.tuple,
    exponents: tl.tuple,
    qdata: tl.tensor,
    found: tl.tensor,
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
    of_blocks = scales + (first_row + m + row) // ROWS * stride_r + c * stride_c
    old = tl.load(of_blocks, mask=(row < rows) & (c < across), other=127).to(tl.int32)
    # Where the scale is NaN this is infinity. The new scale is then NaN, too.
    old = tl.maximum(old << 23, 0x400000).to(tl.float32, bitcast=True)
    v = from_float8(code, BIAS, SOFT) * old[:, :, :, :, None, None]
    # Each thread's maxima, then those of a block, as bytes, whose banks do not conflict.
    new = exponents_of_codes(tl.max(magnitude(v), 0), RULE, BIAS).to(tl.uint8)
    new = tl.reduce(new, 0, _larger).to(tl.int32)
    r = r[:, None, None, None]
    found += (m // NEW_ROWS + r) * K + k + j
    tl.store(found, new.to(tl.uint8), mask=(r * NEW_ROWS < rows) & is_column)
    v = v * multipliers_by(new)
    if RULE == "floor":
        v = saturated(v, BIAS)
    code = to_float8(v, BIAS, SOFT)
    if TRANSPOSED:
        stride, rows = tl.cdiv(M, NEW_ROWS) * NEW_ROWS, tl.cdiv(rows, NEW_ROWS) * NEW_ROWS
        places, mask = (k + j) * stride + m + i, (i < rows) & is_column
        places, mask = tl.permute(places, 3, 4, 5, 2, 1, 0), tl.permute(mask, 3, 4, 5, 2, 1, 0)
        tl.store(qdata + places, tl.permute(code, 3, 4, 5, 2, 1, 0), mask=mask)
    else:
        tl.store(qdata + (m + i) * K + k + j, code, mask=is_element)


@triton.jit
def _store_scales(
    exponents: tl.tuple, scales: tl.tensor, padded: tl.tensor, block: tl.tensor, BLOCK: tl.constexpr
) -> None:
    # Store BLOCK scales, one column after the other.
    data, rows, columns, stride_r, stride_c = exponents
    n = indices(block, BLOCK)
    r, c = n % padded, n // padded
    is_stored = n < padded * columns
    is_block = is_stored & (r < rows)
    found = tl.load(data + r * stride_r + c * stride_c, mask=is_block, other=0).to(tl.int32)
    tl.store(scales + n, tl.where(is_block, scales_by(found), 0.0), mask=is_stored)


@tuned(blocks(4, BLOCK=1024))
@triton.jit
def _gemm_scales(
    a: tl.tuple,
    scales_a: tl.tensor,
    padded_a: tl.tensor,
    b: tl.tuple,
    scales_b: tl.tensor,
    padded_b: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    # One instance: BLOCK scales of one operand. Moves 5 bytes per scale.
    block, of_a = tl.program_id(0), tl.cdiv(padded_a * a[2], BLOCK)
    if block < of_a:
        _store_scales(a, scales_a, padded_a, block, BLOCK)
    else:
        _store_scales(b, scales_b, padded_b, block - of_a, BLOCK)


@triton.jit
def _store_tiles(
    exponents: tl.tuple,
    tiles: tl.tensor,
    repeats: tl.tensor,
    block: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    # Store BLOCK bytes of tiles.
    data, rows, columns, stride_r, stride_c = exponents
    n, across = indices(block, BLOCK), tl.cdiv(columns, 4)
    tile = n // 512
    r = tile // across * 128 + n % 16 // 4 * 32 + n % 512 // 16
    c = tile % across * 4 + n % 4
    is_block = (r < rows * repeats) & (c < columns)
    found = tl.load(data + r // repeats * stride_r + c * stride_c, mask=is_block, other=0)
    tl.store(tiles + n, found, mask=tile < tl.cdiv(rows * repeats, 128) * across)


@tuned(blocks(4, BLOCK=1024))
@triton.jit
def _tiled_exponents(
    a: tl.tuple,
    tiles_a: tl.tensor,
    size_a: tl.tensor,
    b: tl.tuple,
    tiles_b: tl.tensor,
    repeats_b: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    # One instance: BLOCK exponents in the tiles of one operand. Moves 2 bytes per exponent.
    block, of_a = tl.program_id(0), tl.cdiv(size_a, BLOCK)
    if block < of_a:
        _store_tiles(a, tiles_a, 1, block, BLOCK)
    else:
        _store_tiles(b, tiles_b, repeats_b, block - of_a, BLOCK)


@fused(
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
    result, found = empty_reblocked(qdata, exponents, blocks, rows, rule, transposed)

    def grid(chosen: Blocks) -> tuple[int, ...]:
        down = programs(M, max(rows, chosen["BM"]))
        return down, programs(first_column + K, chosen["BN"])

    if qdata.numel():
        _reblock(
            grid,
            *(matrix(qdata), matrix(exponents), as_bytes(result), found),
            *(first_row, first_column),
            ROWS=old_rows,
            COLUMNS=columns,
            NEW_ROWS=rows,
            RULE=rule,
            TRANSPOSED=transposed,
            **float8_constants(qdata.dtype, qdata.device),
        )
    return result, found


@fused(gemm_scales, lambda a, b, multiple=1: a.dtype is torch.uint8)
def _scales_of_both(
    a: torch.Tensor, b: torch.Tensor, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert the exponents of both operands in one launch; 5 bytes per block."""
    rows_a, rows_b = rounded_up(a.shape[0]), rounded_up(b.shape[0], multiple)
    of_a = torch.empty(a.shape[1], rows_a, dtype=torch.float32, device=a.device)
    of_b = torch.empty(b.shape[1], rows_b, dtype=torch.float32, device=a.device)
    arguments = matrix(a), of_a, rows_a, matrix(b), of_b, rows_b
    _gemm_scales(_of_both(of_a, of_b), *arguments)
    return of_a.t(), of_b.t()


@fused(tiled_exponents)
def _tiles_of_both(
    a: torch.Tensor, b: torch.Tensor, repeats: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tile the exponents of both operands in one launch; 2 bytes per exponent in the tiles."""
    sizes = [
        rounded_up(rows, 128) * rounded_up(columns, 4)
        for rows, columns in (a.shape, (b.shape[0] * repeats, b.shape[1]))
    ]
    of_a, of_b = (torch.empty(size, dtype=torch.uint8, device=a.device) for size in sizes)
    arguments = matrix(a), of_a, of_a.numel(), matrix(b), of_b, repeats
    _tiled_exponents(_of_both(of_a, of_b), *arguments)
    return of_a, of_b


def _of_both(of_a: torch.Tensor, of_b: torch.Tensor) -> Callable[[Blocks], tuple[int]]:
    """Return a grid whose instances each write BLOCK elements of one of two results."""
    sizes = of_a.numel(), of_b.numel()
    return lambda chosen: (-(-sizes[0] // chosen["BLOCK"]) + programs(sizes[1], chosen["BLOCK"]),)
