"""Folded casts of grad_output, with the names of :mod:`fp8_dist.linear.rowwise_folded`.

The fp32 intermediates stay in registers. The operations and their order are the same as in
:mod:`fp8_dist.kernels.folding`.
"""

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.results import FoldedRows
from fp8_dist.kernels.cuda.triton.launch import (
    blocks,
    float8_constants,
    programs,
    size_class,
    tuned,
)
from fp8_dist.kernels.cuda.triton.rounding import (
    from_float8,
    indices,
    load_tile,
    magnitude,
    multiplier_of,
    reciprocal,
    saturated,
    store_tile,
    to_float8,
)

UNIT = tl.constexpr(512.0)

_ROWS = (
    blocks(4, BM=16, BN=128),
    blocks(8, BM=16, BN=256),
    blocks(8, BM=32, BN=128),
    blocks(8, BM=64, BN=128),
)


@triton.jit
def _row_amaxes(
    grad: tl.tensor,
    weight_scale: tl.tensor,
    i: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    stride_m: tl.tensor,
    stride_n: tl.tensor,
    WEIGHT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> tl.tensor:
    # The amaxes of rows of g, and of g * s (0 without a weight).
    largest = tl.zeros([BM, BN], tl.int32)
    folded = tl.zeros([BM, BN], tl.int32)
    for block in range(tl.cdiv(N, BN)):
        j = indices(block, BN)
        v = load_tile(grad, i, j, M, N, stride_m, stride_n)
        largest = tl.maximum(largest, magnitude(v))
        if WEIGHT:
            s = tl.load(weight_scale + j, mask=j < N, other=0.0) * UNIT
            folded = tl.maximum(folded, magnitude(v * s[None, :]))
    a0, a1 = tl.max(largest, 1), tl.max(folded, 1)
    return a0.to(tl.float32, bitcast=True), a1.to(tl.float32, bitcast=True)


@triton.jit
def _g0(
    grad: tl.tensor,
    m: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    stride_m: tl.tensor,
    stride_n: tl.tensor,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
) -> tl.tensor:
    # A tile of g, cast by rows and dequantized.
    v = load_tile(grad, i, j, M, N, stride_m, stride_n) * m[:, None]
    return from_float8(to_float8(v, BIAS, SOFT), BIAS, SOFT) * reciprocal(m)[:, None]


@tuned(*_ROWS)
@triton.jit
def _fold_rows(
    grad: tl.tensor,
    weight_scale: tl.tensor,
    input_scale: tl.tensor,
    multiplier: tl.tensor,
    g1: tl.tensor,
    scale: tl.tensor,
    column_amax: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    stride_m: tl.tensor,
    stride_n: tl.tensor,
    WEIGHT: tl.constexpr,
    INPUT: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: BM rows, read for their amaxes, and again, mostly from the L2 cache. Moves the
    # bytes of grad once to twice, and 1 byte per element for g1.
    i = indices(tl.program_id(0), BM)
    a0, a1 = _row_amaxes(grad, weight_scale, i, M, N, stride_m, stride_n, WEIGHT, BM, BN)
    m = multiplier_of(a0, True, BIAS)
    tl.store(multiplier + i, m, mask=i < M)
    if WEIGHT:
        m1 = multiplier_of(a1, True, BIAS)
        tl.store(scale + i, reciprocal(m1 * UNIT), mask=i < M)
    if INPUT:
        t = tl.load(input_scale + i, mask=i < M, other=0.0) * UNIT
    for block in range(tl.cdiv(N, BN)):
        j = indices(block, BN)
        g0 = _g0(grad, m, i, j, M, N, stride_m, stride_n, BIAS, SOFT)
        if WEIGHT:
            s = tl.load(weight_scale + j, mask=j < N, other=0.0) * UNIT
            v = saturated(g0 * s[None, :] * m1[:, None], BIAS)
            store_tile(g1, to_float8(v, BIAS, SOFT), i, j, M, N)
        if INPUT:
            largest = tl.max(magnitude(g0 * t[:, None]), 0)
            tl.atomic_max(column_amax + j, largest, mask=j < N, sem="relaxed")


@tuned(
    blocks(4, BM=64, BN=64),
    blocks(8, BM=64, BN=128),
    blocks(8, BM=128, BN=64),
    blocks(4, BM=32, BN=128),
)
@triton.jit
def _fold_columns(
    grad: tl.tensor,
    multiplier: tl.tensor,
    input_scale: tl.tensor,
    column_amax: tl.tensor,
    g2_t: tl.tensor,
    scale: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    stride_m: tl.tensor,
    stride_n: tl.tensor,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN]. Moves the bytes of grad once, and 1 byte per element.
    i = indices(tl.program_id(0), BM)
    j = indices(tl.program_id(1), BN)
    m = tl.load(multiplier + i, mask=i < M, other=1.0)
    t = tl.load(input_scale + i, mask=i < M, other=0.0) * UNIT
    m2 = multiplier_of(tl.load(column_amax + j, mask=j < N, other=0.0), True, BIAS)
    if tl.program_id(0) == 0:
        tl.store(scale + j, reciprocal(m2) * (1 / UNIT), mask=j < N)
    folded = _g0(grad, m, i, j, M, N, stride_m, stride_n, BIAS, SOFT) * t[:, None]
    code = to_float8(folded * m2[None, :], BIAS, SOFT)
    store_tile(g2_t, tl.trans(code), j, i, N, M)


def fold_rows(
    grad: torch.Tensor,
    weight_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> FoldedRows:
    """Return g1 and the inputs of the second fold.

    Args:
        grad: ``[M, N]``, bf16, fp16 or fp32, any strides.
        weight_scale: s, ``[N]``, fp32, contiguous; ``None`` where g1 is not needed.
        input_scale: t, ``[M]``, fp32, contiguous; ``None`` where g2 is not needed.
        dtype: a float8 dtype.

    Two launches, one without ``input_scale``; 3 to 5 bytes per bf16 element.
    """
    M, N = grad.shape
    device = grad.device
    multiplier = torch.empty(M, 1, dtype=torch.float32, device=device)
    g1 = scale = column_amax = None
    if weight_scale is not None:
        g1 = torch.empty(M, N, dtype=dtype, device=device)
        scale = torch.empty(M, 1, dtype=torch.float32, device=device)
    if input_scale is not None:
        column_amax = torch.zeros(1, N, dtype=torch.float32, device=device)
    _fold_rows(
        lambda chosen: (programs(M, chosen["BM"]),),
        (grad.dtype, size_class(M, N), g1 is None, column_amax is None),
        device,
        *(grad, weight_scale, input_scale),
        multiplier,
        None if g1 is None else g1.view(torch.uint8),
        scale,
        None if column_amax is None else column_amax.view(torch.int32),
        *(M, N, *grad.stride()),
        WEIGHT=weight_scale is not None,
        INPUT=input_scale is not None,
        **float8_constants(dtype, device),
    )
    return FoldedRows(multiplier, g1, scale, column_amax)


def fold_columns(
    grad: torch.Tensor,
    multiplier: torch.Tensor,
    input_scale: torch.Tensor,
    column_amax: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return g2, transposed, and its scale c.

    Args:
        grad: ``[M, N]``, the same as for :func:`fold_rows`.
        multiplier: ``[M, 1]``, from :func:`fold_rows`.
        input_scale: t, ``[M]``, fp32, contiguous.
        column_amax: ``[1, N]``, from :func:`fold_rows`, reduced over ranks that have other rows.
        dtype: a float8 dtype.

    Returns:
        g2 as ``[N, M]``, contiguous, and c, ``[1, N]``.

    One launch; 3 bytes per bf16 element.
    """
    M, N = grad.shape
    device = grad.device
    g2_t = torch.empty(N, M, dtype=dtype, device=device)
    scale = torch.empty(1, N, dtype=torch.float32, device=device)
    _fold_columns(
        lambda chosen: (programs(M, chosen["BM"]), programs(N, chosen["BN"])),
        (grad.dtype, size_class(M, N), grad.stride(1) == 1),
        device,
        *(grad, multiplier, input_scale, column_amax.contiguous()),
        *(g2_t.view(torch.uint8), scale, M, N, *grad.stride()),
        **float8_constants(dtype, device),
    )
    return g2_t, scale
