"""Casts to E2M1, packed or as e4m3 data, and the unpacking, in one launch each."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.blocks import empty_exponents
from fp8_dist.kernels.cuda.triton.blocks import largest_of_each, multipliers_by, spread, takes_size
from fp8_dist.kernels.cuda.triton.launch import (
    DTYPES,
    as_layouts,
    blocks,
    empty_layouts,
    float8_constants,
    fused,
    matrix,
    programs,
    tuned,
)
from fp8_dist.kernels.cuda.triton.rounding import (
    as_fp32,
    indices,
    magnitude,
    store_transposed,
    to_float8,
)
from fp8_dist.kernels.e2m1 import CARRIES, cast_e2m1, empty_packed, unpack_e2m1
from fp8_dist.kernels.quantization import Tensors, rounded_up

_FLOAT8 = torch.float8_e4m3fn


@triton.jit
def _to_e2m1(v: tl.tensor, BIAS: tl.constexpr, SOFT: tl.constexpr) -> tl.tensor:
    """Round fp32 to nearest, ties to even, and return the bytes of e4m3. NaN becomes 0."""
    v = tl.where(v == v, v, 0.0)
    bits = v.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x40C00000)  # at most 6
    # A sum with 2 ** 22 times the power of two of a binade has steps of half that power. Values
    # below 1 have the steps of those above.
    magic = (tl.maximum(size & 0x7F800000, 0x3F800000) + (22 << 23)).to(tl.float32, bitcast=True)
    nearest = (size.to(tl.float32, bitcast=True) + magic) - magic
    bits = nearest.to(tl.int32, bitcast=True) | (bits & -(2**31))
    return to_float8(bits.to(tl.float32, bitcast=True), BIAS, SOFT)


@tuned(blocks(4, BM=32, BN=128), blocks(4, BM=64, BN=64))
@triton.jit
def _cast_e2m1(
    x: tl.tuple,
    first: tl.tuple,
    exponents: tl.tensor,
    copies: tl.tuple,
    packed: tl.tensor | None,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CARRY: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN], enlarged to whole blocks. The exponents are contiguous. They
    # are read if CARRY is None, and otherwise computed by it and written. Moves the bytes of x
    # once, 1 byte per element and layout, and 1 for two packed elements.
    TILE_M: tl.constexpr = BM if BM > ROWS else ROWS
    TILE_N: tl.constexpr = BN if BN > COLUMNS else COLUMNS
    data, M, K, stride_m, stride_k = x
    i, j = (
        indices(tl.program_id(0), TILE_M) - first[0],
        indices(tl.program_id(1), TILE_N) - first[1],
    )
    is_row = ((i >= 0) & (i < M))[:, None]
    mask = is_row & ((j >= 0) & (j < K))[None, :]
    v = as_fp32(tl.load(data + i[:, None] * stride_m + j[None, :] * stride_k, mask=mask, other=0.0))
    down, across = tl.cdiv(first[0] + M, ROWS), tl.cdiv(first[1] + K, COLUMNS)
    r = indices(tl.program_id(0), TILE_M // ROWS)[:, None]
    c = indices(tl.program_id(1), TILE_N // COLUMNS)[None, :]
    of_blocks, is_block = exponents + r * across + c, (r < down) & (c < across)
    if CARRY is None:
        found = tl.load(of_blocks, mask=is_block, other=127).to(tl.int32)
    else:
        largest = largest_of_each(magnitude(v), ROWS, COLUMNS)
        found = tl.maximum(((largest + CARRY) >> 23) - 2, 0)
        found = tl.where(largest >= 0x7F800000, 255, found)
        tl.store(of_blocks, found.to(tl.uint8), mask=is_block)
    byte = _to_e2m1(v * spread(multipliers_by(found), ROWS, COLUMNS), BIAS, SOFT)
    if copies[0] is not None:
        tl.store(copies[0] + i[:, None] * K + j[None, :], byte, mask=mask)
    if copies[1] is not None:
        store_transposed(copies[1], byte, i, j, M, K, IS_PART=True)
    if packed is not None:
        size = (byte & 0x7F).to(tl.int32)
        code = tl.maximum(size >> 5, (size >> 2) - 12) | (byte >> 7 << 3)
        low, high = tl.split(tl.reshape(code, [TILE_M, TILE_N // 2, 2]))
        pair = indices(tl.program_id(1), TILE_N // 2) - first[1] // 2  # first[1] is even
        mask = is_row & ((pair >= 0) & (pair < K // 2))[None, :]
        places = packed + i[:, None] * (K // 2) + pair[None, :]
        tl.store(places, (low | (high << 4)).to(tl.uint8), mask=mask)


@triton.jit
def _byte_of(code: tl.tensor) -> tl.tensor:
    """Convert codes of four bits to e4m3 bytes, int32."""
    index = code & 7
    return tl.minimum(index * 0x30, (index + 12) << 2) | ((code & 8) << 4)


@tuned(blocks(4, BLOCK=4096), blocks(4, BLOCK=1024))
@triton.jit
def _unpack_e2m1(packed: tl.tensor, pairs: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    # One instance: BLOCK pairs of values, each of which it writes as one int16, so that the bytes
    # of neighboring threads are neighbors. Moves 3 bytes per pair.
    i = indices(tl.program_id(0), BLOCK)
    codes = tl.load(packed + i, mask=i < size, other=0).to(tl.int32)
    pair = _byte_of(codes & 0xF) | (_byte_of(codes >> 4) << 8)
    tl.store(pairs + i, pair.to(tl.int16), mask=i < size)


def _takes(x: torch.Tensor, of: Sequence[int], packs: bool) -> bool:
    """Return whether the kernel supports a tensor in these blocks."""
    # Matrices of whole blocks are one matrix.
    is_matrix = x.ndim == 2 or of[0] == 1 or not (x.shape[-2] % of[0] or of[2])
    # Tiles begin at even columns. Pairs must, too.
    has_pairs = not (packs and (x.shape[-1] % 2 or of[3] % 2))
    return x.dtype in DTYPES and is_matrix and has_pairs and takes_size(*of[:2])


@fused(cast_e2m1, lambda x, exponents, blocks, rule, transposed, packs: _takes(x, blocks, packs))
def _cast_copies(
    x: torch.Tensor,
    exponents: torch.Tensor | None,
    blocks: Sequence[int],
    rule: str,
    transposed: Sequence[bool],
    packs: bool,
) -> Tensors:
    """Compute the exponents, unless they are given, and cast with them.

    One launch; 2 bytes per bf16 element, and 1 for each layout or 0.5 if packed.
    """
    found = [empty_exponents(x, blocks)] if exponents is None else []
    transposed = [] if packs else transposed
    copies, packed = empty_layouts(x, _FLOAT8, transposed), [empty_packed(x)] if packs else [None]
    result = [*found, *copies, *(each for each in packed if each is not None)]
    argument, (rows, columns, *first) = matrix(x), blocks
    down, across = first[0] + rounded_up(argument[1]), first[1] + argument[2]
    if x.numel() and result:
        _cast_e2m1(
            lambda chosen: (
                programs(down, max(rows, chosen["BM"])),
                programs(across, max(columns, chosen["BN"])),
            ),
            *(argument, (*first,), found[0] if exponents is None else exponents.contiguous()),
            *(as_layouts(copies, transposed), *packed),
            ROWS=rows,
            COLUMNS=columns,
            CARRY=CARRIES[rule] if exponents is None else None,
            **float8_constants(_FLOAT8, x.device),
        )
    return result


@fused(unpack_e2m1, lambda packed, out: not out.storage_offset() % 2)
def _unpack(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Unpack in one launch; 1.5 bytes per value."""
    pairs = out.view(torch.uint8).view(-1).view(torch.int16)
    if size := pairs.numel():
        data = packed.view(torch.uint8).view(-1)
        _unpack_e2m1(lambda chosen: (programs(size, chosen["BLOCK"]),), data, pairs, size)
