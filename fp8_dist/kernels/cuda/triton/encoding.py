"""Encoding of tensors as codes and block exponents, and sums of these, in one launch each."""

import torch
import triton
import triton.language as tl

from fp8_dist.kernels import encoding as portable
from fp8_dist.kernels.cuda.triton import launch, rounding, tiles
from fp8_dist.kernels.cuda.triton.launch import DTYPES
from fp8_dist.kernels.quantization import as_matrix

_FLOAT8 = torch.float8_e4m3fn
_BLOCK = tl.constexpr(portable.BLOCK)


@triton.jit
def _places(count: tl.tensor, BB: tl.constexpr) -> tl.tuple:
    # Return the indices of this instance's row, blocks and elements. Rows have count blocks.
    instances = tl.cdiv(count, BB)
    row = tl.cast(tl.program_id(0) // instances, tl.int64)
    b = tiles.indices(tl.program_id(0) % instances, BB)
    return row, b, b[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]


@launch.kernel(BB=8)
@triton.jit
def _encode(
    x: tl.tuple,
    codes: tl.tensor,
    exponents: tl.tensor,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BB: tl.constexpr,
) -> None:
    # One instance: BB blocks of a row. Moves the bytes of x once, and 1 byte per element.
    data, _, size, stride, _ = x
    count = tl.cdiv(size, _BLOCK)
    row, b, j = _places(count, BB)
    v = rounding.as_fp32(tl.load(data + row * stride + j, mask=j < size, other=0.0))
    bits = rounding.magnitude(v)
    largest = tl.max(tl.where(bits < 0x7F800000, bits, 0), 1)
    exponent = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 1)
    multiplier = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    code = rounding.to_float8(v * multiplier[:, None], BIAS, SOFT).to(tl.int32)
    code = tl.where(code == 0x80, 0, code)
    code = tl.where(bits > 0x7F800000, 0x80, code)
    code = tl.where(bits == 0x7F800000, tl.where(v > 0, 0x7F, 0xFF), code)
    tl.store(codes + row * size + j, code.to(tl.uint8), mask=j < size)
    tl.store(exponents + row * count + b, exponent.to(tl.uint8), mask=b < count)


@triton.jit
def _decoded(
    code: tl.tensor, exponent: tl.tensor, BIAS: tl.constexpr, SOFT: tl.constexpr
) -> tl.tensor:
    scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    v, c = rounding.from_float8(code, BIAS, SOFT), code.to(tl.int32)
    v = tl.where(c == 0x7F, float("inf"), tl.where(c == 0xFF, float("-inf"), v))
    return tl.where(c == 0x80, float("nan"), v) * scale[:, None]


@launch.kernel(BB=8)
@triton.jit
def _sum(
    rows: tl.tuple,
    exponents: tl.tuple | None,
    local: tl.tuple,
    total: tl.tensor,
    summands: tl.tensor,
    rank: tl.tensor,
    size: tl.tensor,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BB: tl.constexpr,
) -> None:
    # One instance: BB blocks of a row. Rows and exponents are passed with their first two strides,
    # of summands and of rows. Rows without exponents are numbers. If rank is the number of
    # summands, `local` replaces none of them.
    count = tl.cdiv(size, _BLOCK)
    row, b, j = _places(count, BB)
    mask = j < size
    # tl.full makes +0.0 of -0.0.
    result = tl.full([BB, _BLOCK], -(2**31), tl.int32).to(tl.float32, bitcast=True)
    if rank < 0:
        result = rounding.as_fp32(tl.load(local[0] + row * local[3] + j, mask=mask, other=0.0))
    for w in range(summands):
        if w == rank:
            v = rounding.as_fp32(tl.load(local[0] + row * local[3] + j, mask=mask, other=0.0))
        else:
            w64 = tl.cast(w, tl.int64)
            given = tl.load(rows[0] + w64 * rows[1] + row * rows[2] + j, mask=mask, other=0)
            if exponents is None:
                v = rounding.as_fp32(given)
            else:
                at = exponents[0] + w64 * exponents[1] + row * exponents[2] + b
                exponent = tl.load(at, mask=b < count, other=127)
                v = _decoded(given, exponent, BIAS, SOFT)
        result = result + v
    tl.store(total + row * size + j, result, mask=mask)


@launch.fused(portable.encode_float8, lambda x: x.dtype in DTYPES)
def _encode_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, exponents = portable.empty_codes(x)
    if x.numel():
        rows, count = _rows(as_matrix(x)), exponents.shape[-1]
        _encode(
            (len(rows) * launch.programs(count, _encode.blocks["BB"]),),
            *(launch.matrix(rows), codes, exponents),
            **launch.float8_constants(_FLOAT8, x.device),
        )
    return codes, exponents


@launch.fused(
    portable.sum_of_rows,
    lambda rows, exponents, local, rank: (
        (local is None or local.dtype in DTYPES) and (exponents is not None or rows.dtype in DTYPES)
    ),
)
def _sum_of_rows(
    rows: torch.Tensor, exponents: torch.Tensor | None, local: torch.Tensor | None, rank: int
) -> torch.Tensor:
    """Sum rows in one launch."""
    size, summands, count = rows.shape[-1], len(rows), portable.block_count(rows.shape[-1])
    total = torch.empty(rows.shape[1:], dtype=torch.float32, device=rows.device)
    if local is None:
        local, rank = total, summands
    if total.numel():
        _sum(
            (total.numel() // size * launch.programs(count, _sum.blocks["BB"]),),
            _stacked(rows),
            None if exponents is None else _stacked(exponents),
            *(launch.matrix(_rows(as_matrix(local))), total, summands, rank, size),
            **launch.float8_constants(_FLOAT8, rows.device),
        )
    return total


def _stacked(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Return ``[W, ..., n]`` as ``[W, rows, n]``, with the strides of the first two dims."""
    x = _rows(x.flatten(1, -2) if x.ndim > 2 else x.unsqueeze(1))
    return x, x.stride(0), x.stride(1)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with contiguous rows."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
