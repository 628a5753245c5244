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
    fused,
    matrix,
    programs,
    tuned,
)
from fp8_dist.kernels.cuda.triton.launch import Blocks as Sizes
from fp8_dist.kernels.cuda.triton.rounding import (
    as_fp32,
    indices,
    magnitude,
    store_transposed,
)
from fp8_dist.kernels.e2m1 import CARRIES, cast_e2m1, empty_packed, unpack_e2m1
from fp8_dist.kernels.quantization import Tensors, rounded_up

_FLOAT8 = torch.float8_e4m3fn


@triton.jit
def _code_of(v: tl.tensor) -> tl.tensor:
    """Round fp32 to the nearest code of four bits, ties to even: int32. NaN becomes 0."""
    a = tl.abs(v)
    index = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    index += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    index += (a > 5.0).to(tl.int32)
    return index | tl.where(v == v, (v.to(tl.int32, bitcast=True) >> 28) & 8, 0)


@triton.jit
def _byte_of(code: tl.tensor) -> tl.tensor:
    """Convert codes of four bits to e4m3 bytes, int32."""
    index = code & 7
    return tl.minimum(index * 0x30, (index + 12) << 2) | ((code & 8) << 4)


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
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN], enlarged to whole blocks. The exponents are contiguous. They
    # are read if CARRY is None, and otherwise computed by it and written. Moves the bytes of x
    # once, 1 byte per element and layout, and 1 for two packed elements.
    TILE_M: tl.constexpr = BM if BM > ROWS else ROWS
    TILE_N: tl.constexpr = BN if BN > COLUMNS else COLUMNS
    data, M, K, stride_m, stride_k = x
    i = indices(tl.program_id(0), TILE_M) - first[0]
    j = indices(tl.program_id(1), TILE_N) - first[1]
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
    code = _code_of(v * spread(multipliers_by(found), ROWS, COLUMNS))
    byte = _byte_of(code).to(tl.uint8)
    if copies[0] is not None:
        tl.store(copies[0] + i[:, None] * K + j[None, :], byte, mask=mask)
    if copies[1] is not None:
        store_transposed(copies[1], byte, i, j, M, K, IS_PART=True)
    if packed is not None:
        low, high = tl.split(tl.reshape(code, [TILE_M, TILE_N // 2, 2]))
        pair = indices(tl.program_id(1), TILE_N // 2) - first[1] // 2  # first[1] is even
        mask = is_row & ((pair >= 0) & (pair < K // 2))[None, :]
        places = packed + i[:, None] * (K // 2) + pair[None, :]
        tl.store(places, (low | (high << 4)).to(tl.uint8), mask=mask)


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
    copies = empty_layouts(x, _FLOAT8, [] if packs else transposed)
    packed = [empty_packed(x)] if packs else []
    argument, (rows, columns, *first) = matrix(x), blocks
    down, across = first[0] + rounded_up(argument[1]), first[1] + argument[2]

    def grid(chosen: Sizes) -> tuple[int, int]:
        return programs(down, max(rows, chosen["BM"])), programs(across, max(columns, chosen["BN"]))

    if x.numel():
        _cast_e2m1(
            grid,
            *(argument, (*first,), found[0] if exponents is None else exponents.contiguous()),
            *(as_layouts(copies, transposed[: len(copies)]), packed[0] if packs else None),
            ROWS=rows,
            COLUMNS=columns,
            CARRY=CARRIES[rule] if exponents is None else None,
        )
    return [*found, *copies, *packed]


@fused(unpack_e2m1, lambda packed, out: not out.storage_offset() % 2)
def _unpack(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Unpack in one launch; 1.5 bytes per value."""
    pairs = out.view(torch.uint8).view(-1).view(torch.int16)
    if size := pairs.numel():
        data = packed.view(torch.uint8).view(-1)
        _unpack_e2m1(lambda chosen: (programs(size, chosen["BLOCK"]),), data, pairs, size)
