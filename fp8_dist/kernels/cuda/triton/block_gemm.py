"""Operands of GEMMs with block scales: casts to other blocks, dequantized data, and scales."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.blocks import (
    dequantize_blocks,
    empty_reblocked,
    is_transposed,
    reblock,
    transposed_blocks,
)
from fp8_dist.kernels.cuda.triton.blocks import (
    exponents_of_codes,
    multipliers_by,
    scales_by,
    spread,
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
from fp8_dist.kernels.gemm import gemm_scales
from fp8_dist.kernels.quantization import rounded_up


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b)


# Larger tiles spill registers with Triton 3.6.
@tuned(blocks(2, BM=64, BN=64), blocks(2, BM=64, BN=32))
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
def _bf16_bits(v: tl.tensor) -> tl.tensor:
    # Round to nearest even by integers, because the interpreter's conversion changes subnormals.
    bits = v.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.int16)


@tuned(blocks(4, BM=32, BN=128), blocks(4, BM=32, BN=64))
@triton.jit
def _dequantize(
    x: tl.tuple,
    exponents: tl.tuple,
    out: tl.tensor,
    first_row: tl.tensor,
    first_column: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NARROW: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN], widened to whole blocks. Moves 3 bytes per element, 5 for
    # fp32.
    TILE_N: tl.constexpr = BN if BN > COLUMNS else COLUMNS
    data, M, K, stride_m, stride_k = x
    scales, _, across, stride_r, stride_c = exponents
    i = indices(tl.program_id(0), BM)
    j = indices(tl.program_id(1), TILE_N) - first_column
    c = indices(tl.program_id(1), TILE_N // COLUMNS)
    mask = (i < M)[:, None] & ((j >= 0) & (j < K))[None, :]
    code = tl.load(data + i[:, None] * stride_m + j[None, :] * stride_k, mask=mask, other=0)
    is_block = (i < M)[:, None] & (c < across)[None, :]
    found = scales + ((first_row + i) // ROWS)[:, None] * stride_r + c[None, :] * stride_c
    found = tl.load(found, mask=is_block, other=127).to(tl.int32)
    v = from_float8(code, BIAS, SOFT) * spread(scales_by(found), 1, COLUMNS)
    if NARROW:
        v = _bf16_bits(v)
    tl.store(out + i[:, None] * K + j[None, :], v, mask=mask)


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
    result, found = empty_reblocked(qdata, rows, transposed)

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


@fused(
    dequantize_blocks,
    lambda x, scales, blocks, dtype: (
        scales.dtype is torch.uint8
        and takes_size(*blocks[:2])
        and dtype in (torch.bfloat16, torch.float32)
    ),
)
def _dequantized(
    x: torch.Tensor, scales: torch.Tensor, blocks: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize in one launch; 3 bytes per element for bf16, 5 for fp32."""
    if is_transposed(x):
        return _dequantized(x.t(), scales.t(), transposed_blocks(blocks), dtype).t()
    (M, K), (rows, columns, first_row, first_column) = x.shape, blocks
    out = torch.empty(M, K, dtype=dtype, device=x.device)
    narrow = dtype is torch.bfloat16

    def grid(chosen: Blocks) -> tuple[int, ...]:
        across = programs(first_column + K, max(columns, chosen["BN"]))
        return programs(M, chosen["BM"]), across

    if x.numel():
        _dequantize(
            grid,
            *(matrix(x), matrix(scales), out.view(torch.int16) if narrow else out),
            *(first_row, first_column),
            ROWS=rows,
            COLUMNS=columns,
            NARROW=narrow,
            **float8_constants(x.dtype, x.device),
        )
    return out


@fused(gemm_scales, lambda a, b, multiple=1: a.dtype is torch.uint8)
def _scales_of_both(
    a: torch.Tensor, b: torch.Tensor, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert the exponents of both operands in one launch; 5 bytes per block."""
    rows_a, rows_b = rounded_up(a.shape[0]), rounded_up(b.shape[0], multiple)
    of_a = torch.empty(a.shape[1], rows_a, dtype=torch.float32, device=a.device)
    of_b = torch.empty(b.shape[1], rows_b, dtype=torch.float32, device=a.device)
    sizes = of_a.numel(), of_b.numel()
    _gemm_scales(
        lambda chosen: (-(-sizes[0] // chosen["BLOCK"]) + programs(sizes[1], chosen["BLOCK"]),),
        *(matrix(a), of_a, rows_a, matrix(b), of_b, rows_b),
    )
    return of_a.t(), of_b.t()
