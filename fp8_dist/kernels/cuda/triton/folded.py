"""Folded casts of grad_output, with the names of :mod:`fp8_dist.linear.rowwise_folded`.

The fp32 intermediates stay in registers. The operations and their order are the same as in
:mod:`fp8_dist.kernels.folding`.
"""

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton import launch, rounding, tiles
from fp8_dist.kernels.cuda.triton.casts import find_scaling
from fp8_dist.kernels.cuda.triton.launch import BIAS, DTYPES, OF_ROWS, STEPS, TILES
from fp8_dist.kernels.folding import UNIT as FOLDED_UNIT
from fp8_dist.kernels.folding import fold_gradient, fold_groups
from fp8_dist.kernels.quantization import empty_copies

_UNIT = tl.constexpr(FOLDED_UNIT)


@launch.kernel(**OF_ROWS)
@triton.jit
def _multipliers(
    grad: tl.tuple,
    weight_scale: tl.tensor | None,
    multipliers: tl.tuple,
    scale: tl.tensor | None,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: the multipliers of BM rows of g, and with weight_scale those of g * s and their
    # scales. Moves the bytes of grad once.
    M, N = grad[1], grad[2]
    i = tiles.indices(tl.program_id(0), BM)
    largest = tl.zeros([BM, BN], tl.int32)
    folded = tl.zeros([BM, BN], tl.int32)
    for block in range(tl.cdiv(N, BN)):
        j = tiles.indices(block, BN)
        v = tiles.load(grad, i, j)
        largest = tl.maximum(largest, rounding.magnitude(v))
        if weight_scale is not None:
            s = tl.load(weight_scale + j, mask=j < N, other=0.0) * _UNIT
            folded = tl.maximum(folded, rounding.magnitude(v * s[None, :]))
    m = rounding.multiplier_of(tl.max(largest, 1).to(tl.float32, bitcast=True), True, BIAS)
    tl.store(multipliers[0] + i, m, mask=i < M)
    if weight_scale is not None:
        m = rounding.multiplier_of(tl.max(folded, 1).to(tl.float32, bitcast=True), True, BIAS)
        tl.store(multipliers[1] + i, m, mask=i < M)
        tl.store(scale + i, rounding.reciprocal(m * _UNIT), mask=i < M)


@triton.jit
def _g0(
    grad: tl.tuple, m: tl.tensor, i: tl.tensor, j: tl.tensor, BIAS: tl.constexpr, SOFT: tl.constexpr
) -> tl.tensor:
    # Return a tile of g, cast by rows and dequantized.
    code = rounding.to_float8(tiles.load(grad, i, j) * m[:, None], BIAS, SOFT)
    return rounding.from_float8(code, BIAS, SOFT) * rounding.reciprocal(m)[:, None]


# As wide as STRIPES, and 16 bytes of g1 for each thread.
@launch.kernel(BM=2, BN=2048)
@triton.jit
def _fold_rows(
    grad: tl.tuple,
    multipliers: tl.tuple,
    weight_scale: tl.tensor | None,
    input_scale: tl.tensor | None,
    g1: tl.tensor | None,
    column_amax: tl.tensor | None,
    STEPS: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: the part of STEPS * BM rows in BN columns. Moves the bytes of grad once, and
    # 1 byte per element for g1.
    M, N = grad[1], grad[2]
    j = tiles.indices(tl.program_id(1), BN)
    largest = tl.zeros([BM, BN], tl.int32)
    if weight_scale is not None:
        s = tl.load(weight_scale + j, mask=j < N, other=0.0) * _UNIT
    for step in range(STEPS):
        i = tiles.indices(tl.cast(tl.program_id(0), tl.int64) * STEPS + step, BM)
        m = tl.load(multipliers[0] + i, mask=i < M, other=1.0)
        g0 = _g0(grad, m, i, j, BIAS, SOFT)
        if weight_scale is not None:
            m1 = tl.load(multipliers[1] + i, mask=i < M, other=1.0)
            v = rounding.saturated(g0 * s[None, :] * m1[:, None], BIAS)
            tiles.store(g1, rounding.to_float8(v, BIAS, SOFT), i, j, M, N)
        if input_scale is not None:
            t = tl.load(input_scale + i, mask=i < M, other=0.0) * _UNIT
            largest = tl.maximum(largest, rounding.magnitude(g0 * t[:, None]))
    if input_scale is not None:
        tl.atomic_max(column_amax + j, tl.max(largest, 0), mask=j < N, sem="relaxed")


@launch.kernel(**TILES)
@triton.jit
def _fold_columns(
    grad: tl.tuple,
    multiplier: tl.tensor,
    input_scale: tl.tensor,
    column_amax: tl.tensor,
    g2_t: tl.tensor,
    scale: tl.tensor,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN]. Moves the bytes of grad once, and 1 byte per element.
    M, N = grad[1], grad[2]
    i = tiles.indices(tl.program_id(0), BM)
    j = tiles.indices(tl.program_id(1), BN)
    m = tl.load(multiplier + i, mask=i < M, other=1.0)
    t = tl.load(input_scale + i, mask=i < M, other=0.0) * _UNIT
    m2 = rounding.multiplier_of(tl.load(column_amax + j, mask=j < N, other=0.0), True, BIAS)
    if tl.program_id(0) == 0:
        tl.store(scale + j, rounding.reciprocal(m2) * (1 / _UNIT), mask=j < N)
    folded = _g0(grad, m, i, j, BIAS, SOFT) * t[:, None]
    tiles.store_transposed(g2_t, rounding.to_float8(folded * m2[None, :], BIAS, SOFT), i, j, M, N)


@launch.fused(fold_gradient, lambda grad, *rest: grad.dtype in DTYPES and bool(rest[-1]))
def _fold_gradient(
    grad: torch.Tensor,
    dtype: torch.dtype,
    weight_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    transposed: bool,
) -> list[torch.Tensor]:
    """Fold and cast in four launches, two without ``input_scale``.

    It moves 8 bytes per bf16 element, 7 without ``weight_scale``, and 5 without ``input_scale``.
    """
    (M, N), device = grad.shape, grad.device
    results: list[torch.Tensor] = []
    if weight_scale is not None:
        results += empty_copies(grad, dtype, [False])
        results.append(grad.new_empty((M, 1), dtype=torch.float32))
    g1, scale = results or (None, None)
    multipliers = tuple(torch.empty(M, dtype=torch.float32, device=device) for _ in range(2))
    bits = None if input_scale is None else torch.zeros(N, dtype=torch.int32, device=device)
    x = launch.matrix(grad)
    kind = launch.kind_of_call(grad, weight_scale, input_scale)
    arguments = x, weight_scale, multipliers, scale
    _multipliers.repeat(kind, _multipliers.tiles(M), *arguments, BIAS=BIAS[dtype])
    _fold_rows.repeat(
        kind,
        _fold_rows.tiles(M, N, steps=STEPS),
        *(x, multipliers, weight_scale, input_scale, g1, bits),
        STEPS=STEPS,
        **launch.float8_constants(dtype, device),
    )
    if bits is not None:
        results += empty_copies(grad, dtype, [transposed])
        results.append(grad.new_empty((1, N), dtype=torch.float32))
        _fold_columns.repeat(
            kind,
            _fold_columns.tiles(M, N),
            *(x, multipliers[0], input_scale, bits.view(torch.float32)),
            *results[-2:],
            **launch.float8_constants(dtype, device),
        )
    return results


# A thread has W adjacent columns of all rows of a tile: threads share no column.
@launch.kernel(BM=8, BN=512)
@triton.jit
def _fold_rows_of_groups(
    g0: tl.tensor,
    scale0: tl.tensor,
    weight_scale: tl.tensor,
    input_scale: tl.tensor,
    group: tl.tensor,
    g1: tl.tensor,
    scale: tl.tensor,
    column_amax: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: BM rows, one group after the other. Moves 1 byte per element, and with
    # weight_scale 2 more, one of which is mostly read from the L2 cache.
    W: tl.constexpr = 4
    begin = tl.cast(tl.program_id(0), tl.int64) * BM
    i = begin + tl.arange(0, BM)
    group_of_row = tl.load(group + i, mask=i < M, other=-1)
    group_of_row, i = group_of_row[:, None, None], i[:, None, None]
    r = tl.load(scale0 + i, mask=i < M, other=0.0)
    if input_scale is not None:
        t = tl.load(input_scale + i, mask=i < M, other=0.0) * _UNIT
    j0 = tl.arange(0, BN // W)[:, None] * W + tl.arange(0, W)
    last = tl.load(group + tl.minimum(begin + BM, M) - 1)
    for e in range(tl.load(group + begin), last + 1):
        is_row = group_of_row == e
        largest = tl.zeros([BM, BN // W, W], tl.int32)
        for block in range(tl.cdiv(N, BN)):
            j = block * BN + j0
            code = tl.load(g0 + i * N + j, mask=is_row & (j < N), other=0)
            v = rounding.from_float8(code, BIAS, SOFT) * r
            if weight_scale is not None:
                s = tl.load(weight_scale + e * N + j, mask=j < N, other=0.0) * _UNIT
                largest = tl.maximum(largest, tl.where(is_row, rounding.magnitude(v * s), 0))
            if input_scale is not None:
                column_max = tl.max(tl.where(is_row, rounding.magnitude(v * t), 0), 0)
                tl.atomic_max(column_amax + e * N + j, column_max, mask=j < N, sem="relaxed")
        if weight_scale is not None:
            largest = tl.max(tl.reshape(largest, [BM, BN]), 1)[:, None, None]
            m = rounding.multiplier_of(largest.to(tl.float32, bitcast=True), True, BIAS)
            tl.store(scale + i, rounding.reciprocal(m * _UNIT), mask=is_row)
            for block in range(tl.cdiv(N, BN)):
                j = block * BN + j0
                mask = is_row & (j < N)
                code = tl.load(g0 + i * N + j, mask=mask, other=0)
                v = rounding.from_float8(code, BIAS, SOFT) * r
                s = tl.load(weight_scale + e * N + j, mask=j < N, other=0.0) * _UNIT
                v = rounding.saturated(v * s * m, BIAS)
                tl.store(g1 + i * N + j, rounding.to_float8(v, BIAS, SOFT), mask=mask)


@launch.kernel(**TILES)
@triton.jit
def _fold_columns_of_groups(
    g0: tl.tensor,
    scale0: tl.tensor,
    input_scale: tl.tensor,
    group: tl.tensor,
    source: tl.tensor,
    multiplier: tl.tensor,
    g2_t: tl.tensor,
    P: tl.tensor,
    N: tl.tensor,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of BM places and BN columns. Moves 2 bytes per element.
    p = tiles.indices(tl.program_id(0), BM)
    j = tiles.indices(tl.program_id(1), BN)
    i = tl.load(source + p, mask=p < P, other=-1)
    e = tl.load(group + i, mask=i >= 0, other=0)
    r = tl.load(scale0 + i, mask=i >= 0, other=0.0)
    t = tl.load(input_scale + i, mask=i >= 0, other=0.0) * _UNIT
    mask = (i[:, None] >= 0) & (j[None, :] < N)
    m = tl.load(multiplier + e[:, None] * N + j[None, :], mask=mask, other=0.0)
    code = tl.load(g0 + i[:, None] * N + j[None, :], mask=mask, other=0)
    v = rounding.from_float8(code, BIAS, SOFT) * r[:, None] * t[:, None] * m
    code = rounding.to_float8(tl.where(mask, v, 0.0), BIAS, SOFT)
    tiles.store(g2_t, tl.trans(code), j, p, N, P)


def _takes_groups(g0: torch.Tensor, *arguments: object) -> bool:
    input_scale, source = arguments[2], arguments[5] if len(arguments) > 5 else None
    return g0.is_contiguous() and len(g0) > 0 and (input_scale is None or source is not None)


@launch.fused(fold_groups, _takes_groups)
def _fold_groups(
    g0: torch.Tensor,
    scale: torch.Tensor,
    weight_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    group: torch.Tensor,
    groups: int,
    source: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Fold and cast in four launches, one without ``input_scale``; 5 bytes per element.

    It moves 3 bytes per element without ``input_scale`` or without ``weight_scale``.
    """
    (M, N), device, dtype = g0.shape, g0.device, g0.dtype
    results = [torch.empty_like(g0), torch.empty_like(scale)] if weight_scale is not None else []
    scales = [None if s is None else s.contiguous() for s in (weight_scale, input_scale)]
    bits = None if input_scale is None else torch.zeros(groups, N, dtype=torch.int32, device=device)
    _fold_rows_of_groups(
        _fold_rows_of_groups.tiles(M),
        *(g0, scale, *scales, group),
        *(results or (None, None)),
        *(bits, M, N),
        **launch.float8_constants(dtype, device),
    )
    if bits is not None and source is not None:
        P, column_amax = len(source), bits.view(torch.float32)
        multiplier, column_scale = find_scaling(column_amax, dtype, True, 1 / FOLDED_UNIT)
        results += [g0.new_empty((N, P)), column_scale]
        _fold_columns_of_groups(
            _fold_columns_of_groups.tiles(P, N),
            *(g0, scale, scales[1], group, source, multiplier),
            *(results[-2], P, N),
            **launch.float8_constants(dtype, device),
        )
    return results
