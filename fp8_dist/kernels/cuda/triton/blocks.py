"""Casts with block scales, to several layouts, packed, or from other blocks, in one launch.

Block sizes are powers of two. A tile consists of whole blocks, so program instances share nothing.
Scales and their reciprocals are made from exponent bits.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fp8_dist.kernels import blocks as portable
from fp8_dist.kernels.cuda.triton import launch, rounding, tiles
from fp8_dist.kernels.cuda.triton.amaxes import are_alike, entry_of, table_of
from fp8_dist.kernels.cuda.triton.e2m1 import pack, rounded_to_e2m1
from fp8_dist.kernels.cuda.triton.launch import DTYPES
from fp8_dist.kernels.e2m1 import E2M1_X2, data_dtype, empty_packed
from fp8_dist.kernels.quantization import Tensors, rounded_up

# Limits of a block's sides and area: a tile of whole blocks must fit into registers.
_LONGEST, _LARGEST = 256, 128 * 128


@triton.jit
def exponents_of_bits(largest: tl.tensor, RULE: tl.constexpr, BIAS: tl.constexpr) -> tl.tensor:
    """Compute exponents from the bits of amaxes: int32, 255 for NaN."""
    if BIAS == 1:
        CARRY: tl.constexpr = 0x3FFFFF if RULE == "ceil" else (0x200000 if RULE == "even" else 0)
        exponents = tl.maximum(((largest + CARRY) >> 23) - 2, 0)
    elif RULE == "floor":
        # The exponent of the largest number of the format.
        LARGEST: tl.constexpr = 8 if BIAS == 7 else (7 if BIAS == 8 else 15)
        exponents = tl.maximum((largest >> 23) - LARGEST, 0)
    elif RULE == "ceil":
        exponents = rounding.exponents_above(largest.to(tl.float32, bitcast=True), BIAS)
    else:
        m = rounding.multiplier_of(largest.to(tl.float32, bitcast=True), True, BIAS)
        exponents = 254 - (m.to(tl.int32, bitcast=True) >> 23)  # of the reciprocal
    return tl.where(largest >= 0x7F800000, 255, exponents)


@triton.jit
def exponents_of_codes(largest: tl.tensor, RULE: tl.constexpr, BIAS: tl.constexpr) -> tl.tensor:
    """:func:`exponents_of_bits` for amaxes of products of float8 values and powers of two.

    Their mantissas are so short that the exponent follows from a comparison with the mantissa of
    fp8_max, without a division.
    """
    LARGEST: tl.constexpr = 8 if BIAS == 7 else (7 if BIAS == 8 else 15)
    # The mantissa of fp8_max is 1.75, or 1.875.
    ABOVE: tl.constexpr = 0 if RULE == "floor" else (0x0FFFFF if BIAS == 8 else 0x1FFFFF)
    # 1e-12 / fp8_max has this exponent.
    LEAST: tl.constexpr = (80 if BIAS == 8 else (79 if BIAS == 7 else 72)) if RULE is None else 0
    exponents = tl.maximum(((largest + ABOVE) >> 23) - LARGEST, LEAST)
    return tl.where(largest >= 0x7F800000, 255, exponents)


@triton.jit
def multipliers_by(exponents: tl.tensor) -> tl.tensor:
    """Convert exponents to the reciprocals of scales: fp32, subnormal for 254, 0 for 0."""
    bits = tl.where(exponents == 254, 0x400000, (254 - exponents) << 23)
    bits = tl.where(exponents == 0, 0, bits)
    return tl.where(exponents == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def largest_of_each(bits: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """Compute the maximum of each block of a tile."""
    R: tl.constexpr = bits.shape[0] // ROWS
    C: tl.constexpr = bits.shape[1] // COLUMNS
    row_maxima = tl.max(tl.reshape(bits, [R * ROWS, C, COLUMNS]), 2)
    return tl.max(tl.reshape(row_maxima, [R, ROWS, C]), 1)


@triton.jit
def spread(values: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """Expand one value per block to one per element of a tile."""
    R: tl.constexpr = values.shape[0]
    C: tl.constexpr = values.shape[1]
    wide = tl.broadcast_to(values[:, None, :, None], [R, ROWS, C, COLUMNS])
    return tl.reshape(wide, [R * ROWS, C * COLUMNS])


@launch.kernel(BM=32, BN=128)
@triton.jit
def _cast_blocks(
    x: tl.tuple,
    first_row: tl.tensor,
    first_column: tl.tensor,
    exponents: tl.tensor,
    copies: tl.tuple,
    packed: tl.tensor | None,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GIVEN: tl.constexpr,
    RULE: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN], enlarged to whole blocks; or, if x is a table of matrices
    # (amaxes.table_of), every SPLITS-th tile of one of them. The exponents are contiguous. They
    # are read if GIVEN, and otherwise computed by RULE and written. Moves the bytes of x once, and
    # 1 byte per element and layout, or per two packed elements (the first in an even column). If x
    # is float8, it is multiplied by its scales instead, and the first copy is in a wider dtype.
    TILE_M: tl.constexpr = BM if BM > ROWS else ROWS
    TILE_N: tl.constexpr = BN if BN > COLUMNS else COLUMNS
    row_major, transposed = copies
    first, count = 0, 1
    if SPLITS > 0:
        data, M, K, of_matrix, begin = entry_of(x[0], DTYPE, ALIGNED)
        stride_m, stride_k = K, 1
        exponents += of_matrix
        row_major = None if row_major is None else row_major + begin
        packed = None if packed is None else packed + begin
        wide = tl.cdiv(first_column + K, TILE_N)
        first, count = tl.program_id(1), tl.cdiv(first_row + M, TILE_M) * wide
    else:
        data, M, K, stride_m, stride_k = x
    IS_FLOAT8: tl.constexpr = data.dtype.element_ty == tl.uint8
    down, across = tl.cdiv(first_row + M, ROWS), tl.cdiv(first_column + K, COLUMNS)
    for tile in range(first, count, SPLITS if SPLITS > 0 else 1):
        m, n = tl.program_id(0), tl.program_id(1)
        if SPLITS > 0:
            m, n = tile // wide, tile % wide
        i = tiles.indices(m, TILE_M) - first_row
        j = tiles.indices(n, TILE_N) - first_column
        is_row = ((i >= 0) & (i < M))[:, None]
        mask = is_row & ((j >= 0) & (j < K))[None, :]
        v = tl.load(data + i[:, None] * stride_m + j[None, :] * stride_k, mask=mask, other=0.0)
        v = rounding.from_float8(v, BIAS, SOFT) if IS_FLOAT8 else rounding.as_fp32(v)
        r = tiles.indices(m, TILE_M // ROWS)
        c = tiles.indices(n, TILE_N // COLUMNS)
        places = exponents + r[:, None] * across + c[None, :]
        is_block = (r < down)[:, None] & (c < across)[None, :]
        if GIVEN:
            exponent = tl.load(places, mask=is_block, other=127).to(tl.int32)
        else:
            largest = largest_of_each(rounding.magnitude(v), ROWS, COLUMNS)
            exponent = exponents_of_bits(largest, RULE, BIAS)
            tl.store(places, exponent.to(tl.uint8), mask=is_block)
        if IS_FLOAT8:
            bits = tl.where(exponent == 255, 0x7FC00000, tl.maximum(exponent << 23, 0x400000))
            v = v * spread(bits.to(tl.float32, bitcast=True), ROWS, COLUMNS)
            tl.store(row_major + i[:, None] * K + j[None, :], v, mask=mask)
        elif (row_major is not None) or (transposed is not None) or (packed is not None):
            v = v * spread(multipliers_by(exponent), ROWS, COLUMNS)
            v = rounded_to_e2m1(v) if BIAS == 1 else rounding.saturated(v, BIAS)
            code = rounding.to_float8(v, 7 if BIAS == 1 else BIAS, SOFT)
            if row_major is not None:
                tl.store(row_major + i[:, None] * K + j[None, :], code, mask=mask)
            if transposed is not None:
                tiles.store_transposed(transposed, code, i, j, M, K, MAY_BE_NEGATIVE=True)
            if packed is not None:
                pair = tiles.indices(n, TILE_N // 2) - first_column // 2
                mask = is_row & ((pair >= 0) & (pair < K // 2))[None, :]
                tl.store(packed + i[:, None] * (K // 2) + pair[None, :], pack(code), mask=mask)


def takes_size(rows: int, columns: int) -> bool:
    """Return whether the kernels support blocks of this size."""
    are_powers = not (rows & (rows - 1) or columns & (columns - 1))
    return are_powers and max(rows, columns) <= _LONGEST and rows * columns <= _LARGEST


def _takes(x: torch.Tensor, of: Sequence[int], packed: bool = False) -> bool:
    """Return whether the kernels support a tensor in these blocks."""
    # Matrices of whole blocks can be flattened to one matrix.
    is_matrix = x.ndim == 2 or of[0] == 1 or not (x.shape[-2] % of[0] or of[2])
    has_pairs = not packed or not (x.shape[-1] % 2 or of[3] % 2)
    return x.dtype in DTYPES and is_matrix and has_pairs and takes_size(*of[:2])


def _launch(
    x: torch.Tensor,
    exponents: torch.Tensor,
    dtype: torch.dtype,
    of: Sequence[int],
    transposed: Sequence[bool],
    *,
    given: bool = False,
    rule: str | None = None,
    packed: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Cast copies with the given exponents, or else compute and write the exponents first.

    One launch; 2 bytes per bf16 element, and 1 for each layout, or 0.5 if packed. From float8 to a
    wider dtype, it multiplies by the scales.
    """
    copies, argument = launch.empty_layouts(x, data_dtype(dtype), transposed), launch.matrix(x)
    layouts = launch.as_layouts(copies, transposed)
    _, M, K, *_ = argument
    rows, columns, first_row, first_column = of
    down, across = first_row + rounded_up(M), first_column + K
    if x.numel():
        _cast_blocks(
            _cast_blocks.tiles(down, across, at_least=(rows, columns)),
            *(argument, first_row, first_column, exponents, layouts, packed),
            ROWS=rows,
            COLUMNS=columns,
            GIVEN=given,
            RULE=rule,
            **launch.float8_constants(x.dtype if x.itemsize == 1 else dtype, x.device),
            **{"DTYPE": None, "ALIGNED": False, "SPLITS": 0},
        )
    return copies


@launch.fused(portable.block_exponents, lambda x, dtype, blocks, rule: _takes(x, blocks))
def _block_exponents(
    x: torch.Tensor, dtype: torch.dtype, blocks: Sequence[int], rule: str | None
) -> torch.Tensor:
    return _cast_copies(x, dtype, blocks, rule, [])[0]


@launch.fused(portable.cast_blocks, lambda x, dtype, blocks, *_, **__: _takes(x, blocks))
def _cast_copies(
    x: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    rule: str | None,
    transposed: Sequence[bool],
) -> Tensors:
    exponents = portable.empty_exponents(x, blocks)
    return [exponents, *_launch(x, exponents, dtype, blocks, transposed, rule=rule)]


@launch.fused(
    portable.quantize_block_copies, lambda x, exponents, dtype, blocks, *_: _takes(x, blocks)
)
def _quantize_copies(
    x: torch.Tensor,
    exponents: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    transposed: Sequence[bool],
) -> Tensors:
    return _launch(x, exponents.contiguous(), dtype, blocks, transposed, given=True)


@launch.fused(portable.pack_blocks, lambda x, exponents, blocks: _takes(x, blocks, True))
def _pack_blocks(x: torch.Tensor, exponents: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    packed = empty_packed(x)
    _launch(x, exponents.contiguous(), E2M1_X2, blocks, [], given=True, packed=packed)
    return packed


@launch.fused(
    portable.cast_tensors_in_blocks,
    lambda first, others, _, __, of, rule=None, packed=False: (
        are_alike(first, others) and all(_takes(x, of, packed) for x in (first, *others))
    ),
)
def _cast_each(
    first: torch.Tensor,
    others: Sequence[torch.Tensor],
    exponents: torch.Tensor | None,
    dtype: torch.dtype,
    blocks: Sequence[int],
    *,
    rule: str | None = None,
    packed: bool = False,
) -> torch.Tensor:
    """Cast many tensors, or write their exponents, in one launch."""
    tensors, (rows, columns, *start), given = (first, *others), blocks, exponents is not None
    counts = [math.prod(portable.exponents_shape(x.shape, blocks)) for x in tensors]
    sizes = [x.numel() // 2 if packed else x.numel() for x in tensors]
    grid, table, how = table_of(tensors, counts, sizes)
    out = first.new_empty(sum(sizes if given else counts), dtype=torch.uint8)
    copies = (None if packed or not given else out, None), out if packed else None
    kind = {"ROWS": rows, "COLUMNS": columns, "GIVEN": given, "RULE": rule}
    kind |= launch.float8_constants(dtype, first.device) | how
    known = out if exponents is None else exponents.contiguous()
    _cast_blocks(grid, (table,), *start, known, *copies, **kind)
    return out


@launch.fused(
    portable.dequantize_blocks,
    lambda x, scales, blocks, _: (
        (x.ndim, x.itemsize, scales.dtype) == (2, 1, torch.uint8)
        and x.is_contiguous()
        and takes_size(*blocks[:2])
    ),
)
def _dequantize(
    x: torch.Tensor, scales: torch.Tensor, blocks: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize in one launch; 3 bytes per element in bf16."""
    return _launch(x, scales.contiguous(), dtype, blocks, [False], given=True)[0]


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b)


# Larger tiles spill registers with Triton 3.6.
@launch.kernel(warps=2, BM=64, BN=64)
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
    portable.reblock,
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
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast to other blocks in one launch; 2 bytes per element."""
    (M, K), (old_rows, columns, first_row, first_column) = qdata.shape, blocks
    data, new_exponents = portable.empty_reblocked(qdata, exponents, blocks, rows, rule, transposed)
    if qdata.numel():
        _reblock(
            _reblock.tiles(M, first_column + K, at_least=(rows, 1)),
            *(launch.matrix(qdata), launch.matrix(exponents), data, new_exponents),
            *(first_row, first_column),
            ROWS=old_rows,
            COLUMNS=columns,
            NEW_ROWS=rows,
            RULE=rule,
            TRANSPOSED=transposed,
            **launch.float8_constants(qdata.dtype, qdata.device),
        )
    return data, new_exponents
