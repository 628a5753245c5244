"""Encoding of tensors as codes and block exponents, and sums of these, in one launch each."""

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton.launch import (
    DTYPES,
    blocks,
    float8_constants,
    fused,
    matrix,
    programs,
    size_class,
    tuned,
)
from fp8_dist.kernels.cuda.triton.rounding import (
    as_fp32,
    from_float8,
    indices,
    magnitude,
    to_float8,
)
from fp8_dist.kernels.encoding import (
    BLOCK,
    blocks_of,
    decode_float8,
    encode_float8,
    sum_of_float8,
    sum_of_rows,
)
from fp8_dist.kernels.quantization import as_matrix

_FLOAT8 = torch.float8_e4m3fn
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _logical_shift(h: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    return (h >> BITS) & ((1 << (32 - BITS)) - 1)


@triton.jit
def _hash(bits: tl.tensor, place: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """Hash as in fp8_dist.kernels.encoding: int32, products wrap around."""
    h = bits ^ (place * -1640531535 + seed)
    h = (h ^ _logical_shift(h, 16)) * -2048144789
    h = (h ^ _logical_shift(h, 13)) * -1028477387
    return h ^ _logical_shift(h, 16)


@triton.jit
def _stochastic(v: tl.tensor, scaled: tl.tensor, place: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """Round ``scaled`` to one of its two neighbors in e4m3fn."""
    h = _hash(v.to(tl.int32, bitcast=True), place, seed)
    uniform = (h & 0xFFFFF).to(tl.float32) * (2.0**-20)
    exponent = ((scaled.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 3
    exponent = tl.minimum(tl.maximum(exponent, 118), 135)  # 135: not finite; _encode replaces it
    step = (exponent << 23).to(tl.float32, bitcast=True)
    steps = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # 1 / step
    number = scaled * steps + uniform
    down = number.to(tl.int32)  # toward 0; tl.floor would treat subnormals as 0
    down = tl.where(down.to(tl.float32) > number, down - 1, down)
    return down.to(tl.float32) * step


@triton.jit
def _places(count: tl.tensor, BB: tl.constexpr) -> tl.tuple:
    # Return the indices of this instance's row, blocks and elements. Rows have count blocks.
    of_row = tl.cdiv(count, BB)
    row = tl.cast(tl.program_id(0) // of_row, tl.int64)
    b = indices(tl.program_id(0) % of_row, BB)
    return row, b, b[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]


@tuned(blocks(4, BB=8), blocks(4, BB=16), blocks(8, BB=32))
@triton.jit
def _encode(
    x: tl.tuple,
    codes: tl.tensor,
    exponents: tl.tensor,
    seed: tl.tensor,
    STOCHASTIC: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BB: tl.constexpr,
) -> None:
    # One instance: BB blocks of a row. Moves the bytes of x once, and 1 byte per element.
    data, _, size, stride, _ = x
    count = tl.cdiv(size, _BLOCK)
    row, b, j = _places(count, BB)
    v = as_fp32(tl.load(data + row * stride + j, mask=j < size, other=0.0))
    bits = magnitude(v)
    largest = tl.max(tl.where(bits < 0x7F800000, bits, 0), 1)
    exponent = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 1)
    multiplier = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = v * multiplier[:, None]
    if STOCHASTIC:
        scaled = _stochastic(v, scaled, (row * size + j).to(tl.int32), seed)
    code = to_float8(scaled, BIAS, SOFT).to(tl.int32)
    code = tl.where(code == 0x80, 0, code)
    code = tl.where(bits > 0x7F800000, 0x80, code)
    code = tl.where(bits == 0x7F800000, tl.where(v > 0, 0x7F, 0xFF), code)
    tl.store(codes + row * size + j, code.to(tl.uint8), mask=j < size)
    tl.store(exponents + row * count + b, exponent.to(tl.uint8), mask=b < count)


@tuned(blocks(4, BB=8), blocks(4, BB=16), blocks(8, BB=16))
@triton.jit
def _sum(
    codes: tl.tuple,
    exponents: tl.tuple,
    own: tl.tuple,
    total: tl.tensor,
    summands: tl.tensor,
    rank: tl.tensor,
    size: tl.tensor,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BB: tl.constexpr,
) -> None:
    # One instance: BB blocks of a row. Codes and exponents come with their strides of summands and
    # of rows.
    count = tl.cdiv(size, _BLOCK)
    row, b, j = _places(count, BB)
    mask = j < size
    of_codes, of_exponents = codes[0] + row * codes[2], exponents[0] + row * exponents[2]
    found = tl.zeros([BB, _BLOCK], tl.float32)
    for w in range(summands):
        if w == rank:
            v = as_fp32(tl.load(own[0] + row * own[3] + j, mask=mask, other=0.0))
        else:
            w64 = tl.cast(w, tl.int64)
            code = tl.load(of_codes + w64 * codes[1] + j, mask=mask, other=0)
            at = of_exponents + w64 * exponents[1] + b
            exponent = tl.load(at, mask=b < count, other=127)
            scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            v = from_float8(code, BIAS, SOFT)
            c = code.to(tl.int32)
            v = tl.where(c == 0x7F, float("inf"), tl.where(c == 0xFF, float("-inf"), v))
            v = tl.where(c == 0x80, float("nan"), v) * scale[:, None]
        found = found + v
    tl.store(total + row * size + j, found, mask=mask)


@tuned(blocks(4, BN=1024), blocks(8, BN=2048))
@triton.jit
def _sum_rows(
    rows: tl.tensor,
    own: tl.tensor,
    total: tl.tensor,
    summands: tl.tensor,
    rank: tl.tensor,
    size: tl.tensor,
    BN: tl.constexpr,
) -> None:
    j = indices(tl.program_id(0), BN)
    found = tl.zeros([BN], tl.float32)
    for w in range(summands):
        if w == rank:
            v = as_fp32(tl.load(own + j, mask=j < size, other=0.0))
        else:
            at = rows + tl.cast(w, tl.int64) * size + j
            v = as_fp32(tl.load(at, mask=j < size, other=0.0))
        found = found + v
    tl.store(total + j, found, mask=j < size)


@fused(encode_float8, lambda x, seed: x.dtype in DTYPES)
def _encode_float8(x: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    count = blocks_of(x.shape[-1])
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    exponents = codes.new_empty(*x.shape[:-1], count)
    if x.numel():
        rows = _rows(as_matrix(x))
        _encode(
            lambda chosen: (len(rows) * programs(count, chosen["BB"]),),
            (x.dtype, seed >= 0, *size_class(x.numel())),
            x.device,
            *(matrix(rows), codes, exponents, max(seed, 0)),
            STOCHASTIC=seed >= 0,
            **float8_constants(_FLOAT8, x.device),
        )
    return codes, exponents


@fused(sum_of_float8, lambda codes, exponents, own, rank: own.dtype in DTYPES)
def _sum_of_float8(
    codes: torch.Tensor, exponents: torch.Tensor, own: torch.Tensor, rank: int
) -> torch.Tensor:
    return _sum_of(codes, exponents, _rows(as_matrix(own)), rank)


def _sum_of(
    codes: torch.Tensor, exponents: torch.Tensor, own: torch.Tensor, rank: int
) -> torch.Tensor:
    """Sum codes, and ``own`` as ``[rows, n]``, which is not read if ``rank`` is negative."""
    shape, size, count = codes.shape[1:], codes.shape[-1], exponents.shape[-1]
    total = torch.empty(shape, dtype=torch.float32, device=codes.device)
    if total.numel():
        # [W, ..., n] as [W, rows, n]
        codes, exponents = (
            _rows(t.flatten(1, -2) if t.ndim > 2 else t.unsqueeze(1)) for t in (codes, exponents)
        )
        _sum(
            lambda chosen: (total.numel() // size * programs(count, chosen["BB"]),),
            (own.dtype, *size_class(len(codes), total.numel())),
            codes.device,
            *((t, *t.stride()[:2]) for t in (codes, exponents)),
            *(matrix(own), total, len(codes), rank, size),
            **float8_constants(_FLOAT8, codes.device),
        )
    return total


@fused(sum_of_rows, lambda rows, own, rank: rows.dtype in DTYPES and own.dtype in DTYPES)
def _sum_of_rows(rows: torch.Tensor, own: torch.Tensor, rank: int) -> torch.Tensor:
    total = torch.empty(rows.shape[1:], dtype=torch.float32, device=rows.device)
    size = total.numel()
    if size:
        _sum_rows(
            lambda chosen: (programs(size, chosen["BN"]),),
            (rows.dtype, own.dtype, *size_class(len(rows), size)),
            rows.device,
            *(rows.contiguous(), own.contiguous(), total, len(rows), rank, size),
        )
    return total


@fused(decode_float8)
def _decode_float8(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    none = codes.new_empty(1, 1, dtype=torch.float32)
    return _sum_of(codes.unsqueeze(0), exponents.unsqueeze(0), none, -1)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with contiguous rows."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
