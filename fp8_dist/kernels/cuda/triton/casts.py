"""Casts to float8, in one layout or both, by a given amax or multiplier, or by rows in one launch.

Writing both layouts in one pass moves 4 bytes per bf16 element. GEMMs then need no transposing
copy.
"""

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.results import Cast, Layouts
from fp8_dist.kernels.cuda.triton.launch import (
    as_float8,
    blocks,
    empty_bytes,
    float8_constants,
    programs,
    size_class,
    tuned,
)
from fp8_dist.kernels.cuda.triton.rounding import (
    indices,
    load_tile,
    magnitude,
    multiplier_of,
    reciprocal,
    saturated,
    store_tile,
    to_float8,
)

# Granularity of the scales.
TENSOR = tl.constexpr(0)
ROW = tl.constexpr(1)
COLUMN = tl.constexpr(2)


@triton.jit
def _load_scales(
    given: tl.tensor,
    stride: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    OF: tl.constexpr,
) -> tl.tensor:
    # An amax or a multiplier for each row or column of a tile, or one for all.
    if OF == ROW:
        scales = tl.load(given + i * stride, mask=i < M, other=1.0)
    elif OF == COLUMN:
        scales = tl.load(given + j * stride, mask=j < K, other=1.0)
    else:
        scales = tl.load(given)
    return scales


@triton.jit
def _store_scaling(
    multiplier: tl.tensor,
    scale: tl.tensor,
    m: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    OF: tl.constexpr,
) -> None:
    # Each is stored once, by the tiles of the first column or the first row, or by the first tile.
    if OF == ROW:
        if tl.program_id(1) == 0:
            tl.store(multiplier + i, m, mask=i < M)
            tl.store(scale + i, reciprocal(m), mask=i < M)
    elif OF == COLUMN:
        if tl.program_id(0) == 0:
            tl.store(multiplier + j, m, mask=j < K)
            tl.store(scale + j, reciprocal(m), mask=j < K)
    elif tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(multiplier, m)
        tl.store(scale, reciprocal(m))


@triton.jit
def _times(x: tl.tensor, m: tl.tensor, OF: tl.constexpr) -> tl.tensor:
    if OF == ROW:
        product = x * m[:, None]
    elif OF == COLUMN:
        product = x * m[None, :]
    else:
        product = x * m
    return product


@tuned(
    blocks(4, BM=64, BN=64),
    blocks(8, BM=64, BN=128),
    blocks(8, BM=128, BN=64),
    blocks(4, BM=32, BN=128),
)
@triton.jit
def _cast(
    x: tl.tensor,
    given: tl.tensor,
    qdata: tl.tensor,
    qdata_t: tl.tensor,
    amax: tl.tensor,
    multiplier: tl.tensor,
    scale: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    stride_m: tl.tensor,
    stride_k: tl.tensor,
    stride_given: tl.tensor,
    OF: tl.constexpr,
    FROM_AMAX: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    SATURATE: tl.constexpr,
    TAKE_AMAX: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
    COLUMN_MAJOR: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN]. Moves the bytes of x once, and 1 byte per element and
    # layout.
    i = indices(tl.program_id(0), BM)
    j = indices(tl.program_id(1), BN)
    m = _load_scales(given, stride_given, i, j, M, K, OF)
    if FROM_AMAX:
        m = multiplier_of(m, POWER_OF_2, BIAS)
        _store_scaling(multiplier, scale, m, i, j, M, K, OF)
    v = load_tile(x, i, j, M, K, stride_m, stride_k)
    if TAKE_AMAX:
        tl.atomic_max(amax, tl.max(tl.max(magnitude(v), 1), 0))
    v = _times(v, m, OF)
    if SATURATE:
        v = saturated(v, BIAS)
    code = to_float8(v, BIAS, SOFT)
    if ROW_MAJOR:
        store_tile(qdata, code, i, j, M, K)
    if COLUMN_MAJOR:
        store_tile(qdata_t, tl.trans(code), j, i, K, M)


@tuned(
    blocks(4, BM=32, BN=128),
    blocks(8, BM=32, BN=256),
    blocks(8, BM=64, BN=128),
    blocks(4, BM=16, BN=256),
)
@triton.jit
def _cast_rows(
    x: tl.tensor,
    qdata: tl.tensor,
    qdata_t: tl.tensor,
    multiplier: tl.tensor,
    scale: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    stride_m: tl.tensor,
    stride_k: tl.tensor,
    POWER_OF_2: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
    COLUMN_MAJOR: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: BM rows, read for their amaxes, and again, mostly from the L2 cache, for the
    # cast. Moves the bytes of x once to twice, and 1 byte per element and layout.
    i = indices(tl.program_id(0), BM)
    largest = tl.zeros([BM, BN], tl.int32)
    for block in range(tl.cdiv(K, BN)):
        j = indices(block, BN)
        largest = tl.maximum(largest, magnitude(load_tile(x, i, j, M, K, stride_m, stride_k)))
    m = multiplier_of(tl.max(largest, 1).to(tl.float32, bitcast=True), POWER_OF_2, BIAS)
    tl.store(multiplier + i, m, mask=i < M)
    tl.store(scale + i, reciprocal(m), mask=i < M)
    for block in range(tl.cdiv(K, BN)):
        j = indices(block, BN)
        v = load_tile(x, i, j, M, K, stride_m, stride_k) * m[:, None]
        code = to_float8(v, BIAS, SOFT)
        if ROW_MAJOR:
            store_tile(qdata, code, i, j, M, K)
        if COLUMN_MAJOR:
            store_tile(qdata_t, tl.trans(code), j, i, K, M)


def _covered(scales: torch.Tensor, M: int, K: int) -> tuple[int, int]:
    """Granularity of scales, and the stride from one scale to the next."""
    if scales.numel() == 1:
        return TENSOR.value, 0
    if scales.shape == (M, 1):
        return ROW.value, scales.stride(0)
    assert scales.shape == (1, K), (scales.shape, M, K)
    return COLUMN.value, scales.stride(1)


def cast(
    x: torch.Tensor,
    amax: torch.Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    *,
    row_major: bool = True,
    column_major: bool = False,
) -> Cast:
    """Cast a matrix to float8 by amaxes that none of its values exceeds.

    Args:
        x: ``[M, K]``, bf16, fp16 or fp32, any strides.
        amax: fp32, 0-dim, ``[M, 1]`` or ``[1, K]``.
        dtype: a float8 dtype.
        power_of_2: round multipliers down to powers of two.
        row_major: whether to write ``qdata``.
        column_major: whether to write ``qdata_t``.

    One launch; 3 bytes per bf16 element, 4 for both layouts.
    """
    multiplier, scale = torch.empty_like(amax), torch.empty_like(amax)
    qdata, qdata_t = _cast_by(
        x, amax, dtype, multiplier, scale, power_of_2, False, None, row_major, column_major
    )
    return Cast(qdata, qdata_t, multiplier, scale)


def quantize(
    x: torch.Tensor,
    multiplier: torch.Tensor,
    dtype: torch.dtype,
    *,
    fits: bool = False,
    row_major: bool = True,
    column_major: bool = False,
) -> Layouts:
    """:func:`fp8_dist.kernels.quantize` of a matrix, in one layout or both.

    Args:
        multiplier: fp32, 0-dim, ``[M, 1]`` or ``[1, K]``.

    Other arguments are as in :func:`cast`. One launch; 3 bytes per bf16 element, 4 for both
    layouts.
    """
    return Layouts(
        *_cast_by(x, multiplier, dtype, None, None, False, not fits, None, row_major, column_major)
    )


def quantize_and_reduce(
    x: torch.Tensor,
    multiplier: torch.Tensor,
    dtype: torch.dtype,
    amax: torch.Tensor,
    *,
    row_major: bool,
    column_major: bool,
) -> Layouts:
    """:func:`quantize` that also reduces ``x`` into ``amax``, a 0-dim fp32 zero. One launch."""
    return Layouts(
        *_cast_by(x, multiplier, dtype, None, None, False, True, amax, row_major, column_major)
    )


def _cast_by(
    x: torch.Tensor,
    given: torch.Tensor,
    dtype: torch.dtype,
    multiplier: torch.Tensor | None,
    scale: torch.Tensor | None,
    power_of_2: bool,
    saturate: bool,
    amax: torch.Tensor | None,
    row_major: bool,
    column_major: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    (M, K), (stride_m, stride_k) = x.shape, x.stride()
    of, stride = _covered(given, M, K)
    qdata = empty_bytes(row_major, x, M, K)
    qdata_t = empty_bytes(column_major, x, K, M)
    _cast(
        lambda chosen: (programs(M, chosen["BM"]), programs(K, chosen["BN"])),
        (x.dtype, size_class(M, K), stride_k == 1, row_major, column_major),
        x.device,
        *(x, given, qdata, qdata_t, None if amax is None else amax.view(torch.int32)),
        *(multiplier, scale, M, K, stride_m, stride_k, stride),
        OF=of,
        FROM_AMAX=multiplier is not None,
        POWER_OF_2=power_of_2,
        SATURATE=saturate,
        TAKE_AMAX=amax is not None,
        ROW_MAJOR=row_major,
        COLUMN_MAJOR=column_major,
        **float8_constants(dtype, x.device),
    )
    return as_float8(qdata, dtype), as_float8(qdata_t, dtype)


def cast_rows(
    x: torch.Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    *,
    row_major: bool = True,
    column_major: bool = False,
) -> Cast:
    """Compute the amaxes of the rows of a matrix and cast it to float8 with a scale per row.

    Arguments are as in :func:`cast`; multiplier and scale are ``[M, 1]``. One launch; 3 to 5 bytes
    per bf16 element, 1 more for both layouts.
    """
    M, K = x.shape
    multiplier, scale = (torch.empty(M, 1, dtype=torch.float32, device=x.device) for _ in range(2))
    qdata = empty_bytes(row_major, x, M, K)
    qdata_t = empty_bytes(column_major, x, K, M)
    _cast_rows(
        lambda chosen: (programs(M, chosen["BM"]),),
        (x.dtype, size_class(M, K), x.stride(1) == 1, row_major, column_major),
        x.device,
        *(x, qdata, qdata_t, multiplier, scale, M, K, *x.stride()),
        POWER_OF_2=power_of_2,
        ROW_MAJOR=row_major,
        COLUMN_MAJOR=column_major,
        **float8_constants(dtype, x.device),
    )
    return Cast(as_float8(qdata, dtype), as_float8(qdata_t, dtype), multiplier, scale)
