"""Functions of the block kernels: exponents, scales, and the cast of a tile.

Block sizes are powers of two. A tile consists of whole blocks, so program instances share nothing.
Powers of two are built from exponent bits.
"""

import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton.rounding import (
    as_fp32,
    exponents_above,
    indices,
    magnitude,
    multiplier_of,
    saturated,
    to_float8,
)


@triton.jit
def exponents_of(largest: tl.tensor, RULE: tl.constexpr, BIAS: tl.constexpr) -> tl.tensor:
    """Exponents from the bits of amaxes: int32, 255 for NaN."""
    if RULE == "floor":
        # The exponent of the largest number of the format.
        LARGEST: tl.constexpr = 8 if BIAS == 7 else (7 if BIAS == 8 else 15)
        exponents = tl.maximum((largest >> 23) - LARGEST, 0)
    elif RULE == "ceil":
        exponents = exponents_above(largest.to(tl.float32, bitcast=True), BIAS)
    else:
        m = multiplier_of(largest.to(tl.float32, bitcast=True), True, BIAS)
        exponents = 254 - (m.to(tl.int32, bitcast=True) >> 23)  # of the reciprocal
    return tl.where(largest >= 0x7F800000, 255, exponents)


@triton.jit
def multipliers_by(exponents: tl.tensor) -> tl.tensor:
    """Reciprocals of the scales of exponents: fp32, subnormal for 254, 0 for 0."""
    bits = tl.where(exponents == 254, 0x400000, (254 - exponents) << 23)
    bits = tl.where(exponents == 0, 0, bits)
    return tl.where(exponents == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def scales_by(exponents: tl.tensor) -> tl.tensor:
    """Scales of exponents: fp32, subnormal for 0."""
    bits = tl.where(exponents == 0, 0x400000, exponents << 23)
    return tl.where(exponents == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def largest_of_each(bits: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """Maximum of each block of a tile."""
    R: tl.constexpr = bits.shape[0] // ROWS
    C: tl.constexpr = bits.shape[1] // COLUMNS
    found = tl.max(tl.reshape(bits, [R * ROWS, C, COLUMNS]), 2)
    return tl.max(tl.reshape(found, [R, ROWS, C]), 1)


@triton.jit
def spread(values: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """Expand one value per block to one per element of a tile."""
    R: tl.constexpr = values.shape[0]
    C: tl.constexpr = values.shape[1]
    wide = tl.broadcast_to(values[:, None, :, None], [R, ROWS, C, COLUMNS])
    return tl.reshape(wide, [R * ROWS, C * COLUMNS])


@triton.jit
def cast_tile(
    x: tl.tensor,
    exponents: tl.tensor,
    qdata: tl.tensor,
    qdata_t: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
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
    """Cast the tile at this row and column of [BM, BN] tiles of a part of a matrix.

    Args:
        exponents: contiguous; read if GIVEN, otherwise written.
        RULE: rule of exponents that are not given.
    """
    i = indices(row, BM) - first_row
    j = indices(column, BN) - first_column
    mask = ((i >= 0) & (i < M))[:, None] & ((j >= 0) & (j < K))[None, :]
    v = as_fp32(tl.load(x + i[:, None] * stride_m + j[None, :] * stride_k, mask=mask, other=0.0))
    down, across = tl.cdiv(first_row + M, ROWS), tl.cdiv(first_column + K, COLUMNS)
    r, c = indices(row, BM // ROWS), indices(column, BN // COLUMNS)
    blocks = exponents + r[:, None] * across + c[None, :]
    is_block = (r < down)[:, None] & (c < across)[None, :]
    if GIVEN:
        found = tl.load(blocks, mask=is_block, other=127).to(tl.int32)
    else:
        found = exponents_of(largest_of_each(magnitude(v), ROWS, COLUMNS), RULE, BIAS)
        tl.store(blocks, found.to(tl.uint8), mask=is_block)
    if ROW_MAJOR or COLUMN_MAJOR:
        v = saturated(v * spread(multipliers_by(found), ROWS, COLUMNS), BIAS)
        code = to_float8(v, BIAS, SOFT)
        if ROW_MAJOR:
            tl.store(qdata + i[:, None] * K + j[None, :], code, mask=mask)
        if COLUMN_MAJOR:
            out = qdata_t + j[:, None] * M + i[None, :]
            tl.store(out, tl.trans(code), mask=tl.trans(mask))
