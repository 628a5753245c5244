"""Casts to float8 with given amaxes or multipliers, or with amaxes found here.

A cast writes one layout or both. Writing both in one pass moves 4 bytes per bf16 element, and GEMMs
then need no transposed copies.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_dist.kernels import quantization
from fp8_dist.kernels.cuda.triton import launch, rounding, tiles
from fp8_dist.kernels.cuda.triton.amaxes import amax_of_matrix, are_alike, entry_of, table_of
from fp8_dist.kernels.cuda.triton.launch import BIAS, DTYPES, OF_ROWS, TILES
from fp8_dist.kernels.grouped import empty_places, places_of_groups, rows_of_groups
from fp8_dist.kernels.quantization import ALIGNMENT, Tensors, as_matrix
from fp8_dist.kernels.scale import Scaling, covered_dims, scaling_from_amax

_WIDEST = 16384  # columns of a row that the registers of an instance hold


@launch.kernel(BLOCK=1024)
@triton.jit
def _scaling(
    amax: tl.tensor,
    multiplier: tl.tensor,
    scale: tl.tensor,
    size: tl.tensor,
    FACTOR: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # One instance: BLOCK amaxes. Moves 12 bytes per amax.
    i = tiles.indices(tl.program_id(0), BLOCK)
    m = rounding.multiplier_of(tl.load(amax + i, mask=i < size, other=1.0), POWER_OF_2, BIAS)
    tl.store(multiplier + i, m, mask=i < size)
    tl.store(scale + i, rounding.reciprocal(m) * FACTOR, mask=i < size)


@launch.kernel(**TILES)
@triton.jit
def _cast(
    x: tl.tuple,
    given: tl.tensor,
    stride_given: tl.tensor,
    rows_of_each: tl.tensor,
    copies: tl.tuple,
    amax: tl.tensor | None,
    scale: tl.tensor | None,
    OF: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    SATURATE: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN]. If there are scales to write, the given numbers are amaxes,
    # otherwise multipliers; those of rows cover rows_of_each rows. Moves the bytes of x once, and 1
    # byte per element and layout.
    M, K = x[1], x[2]
    i = tiles.indices(tl.program_id(0), BM)
    j = tiles.indices(tl.program_id(1), BN)
    row, column = i[:, None], j[None, :]
    if OF == "row":
        m = tl.load(given + row // rows_of_each * stride_given, mask=row < M, other=1.0)
    elif OF == "column":
        m = tl.load(given + column * stride_given, mask=column < K, other=1.0)
    else:
        m = tl.load(given)
    if scale is not None:
        m = rounding.multiplier_of(m, POWER_OF_2, BIAS)
        # Scales are stored by the tiles of the first column or row, or by the first tile.
        if OF == "row":
            if tl.program_id(1) == 0:
                tl.store(scale + row // rows_of_each, rounding.reciprocal(m), mask=row < M)
        elif OF == "column":
            if tl.program_id(0) == 0:
                tl.store(scale + column, rounding.reciprocal(m), mask=column < K)
        elif tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(scale, rounding.reciprocal(m))
    v = tiles.load(x, i, j)
    if amax is not None:
        tl.atomic_max(amax, tl.max(tl.max(rounding.magnitude(v), 1), 0), sem="relaxed")
    v = v * m
    if SATURATE:
        v = rounding.saturated(v, BIAS)
    code = rounding.to_float8(v, BIAS, SOFT)
    if copies[0] is not None:
        tiles.store(copies[0], code, i, j, M, K)
    if copies[1] is not None:
        tiles.store_transposed(copies[1], code, i, j, M, K)


@launch.kernel(**OF_ROWS)
@triton.jit
def _cast_many(
    table: tl.tensor,
    amaxes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    OF_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: every SPLITS-th block of BM rows of one matrix of the table
    # (amaxes.table_of). Moves the bytes of all tensors once, and 1 byte per element.
    x, M, K, first, begin = entry_of(table, DTYPE, ALIGNED)
    out += begin
    m = 1.0
    if not OF_ROWS:
        m = rounding.multiplier_of(tl.load(amaxes + first), POWER_OF_2, BIAS)
        if tl.program_id(1) == 0:
            tl.store(scales + first, rounding.reciprocal(m))
    for block in range(tl.program_id(1), tl.cdiv(M, BM), SPLITS):
        i = tiles.indices(block, BM)
        if OF_ROWS:
            of_rows = tl.load(amaxes + first + i, mask=i < M, other=1.0)
            of_rows = rounding.multiplier_of(of_rows, POWER_OF_2, BIAS)
            tl.store(scales + first + i, rounding.reciprocal(of_rows), mask=i < M)
        for part in range(tl.cdiv(K, BN)):
            j = tiles.indices(part, BN)
            v = tiles.load((x, M, K, K, 1), i, j) * (of_rows[:, None] if OF_ROWS else m)
            code = rounding.to_float8(rounding.saturated(v, BIAS), BIAS, SOFT)
            tiles.store(out, code, i, j, M, K)


@launch.kernel(warps=8)
@triton.jit
def _cast_rows(
    x: tl.tuple,
    out: tl.tensor,
    amax_and_scale: tl.tuple,
    POWER_OF_2: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: BM rows of at most BN columns, which stay in registers. Moves the bytes of x
    # once, and 1 byte per element.
    M, K = x[1], x[2]
    i = tiles.indices(tl.program_id(0), BM)
    j = tiles.indices(tl.program_id(1), BN)
    v = tiles.load(x, i, j)
    amax = tl.max(rounding.magnitude(v), 1).to(tl.float32, bitcast=True)
    m = rounding.multiplier_of(amax, POWER_OF_2, BIAS)
    tl.store(amax_and_scale[0] + i, amax, mask=i < M)
    tl.store(amax_and_scale[1] + i, rounding.reciprocal(m), mask=i < M)
    tiles.store(out, rounding.to_float8(v * m[:, None], BIAS, SOFT), i, j, M, K)


@launch.kernel(**TILES)
@triton.jit
def _cast_rows_and_columns(
    x: tl.tuple,
    amaxes: tl.tuple,
    copies: tl.tuple,
    scales: tl.tuple,
    POWER_OF_2: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN]. Moves the bytes of x once, and 2 bytes per element.
    M, K = x[1], x[2]
    i = tiles.indices(tl.program_id(0), BM)
    j = tiles.indices(tl.program_id(1), BN)
    row = rounding.multiplier_of(tl.load(amaxes[0] + i, mask=i < M, other=1.0), POWER_OF_2, BIAS)
    column = tl.load(amaxes[1] + j, mask=j < K, other=1.0)
    column = rounding.multiplier_of(column, POWER_OF_2, BIAS)
    if tl.program_id(1) == 0:
        tl.store(scales[0] + i, rounding.reciprocal(row), mask=i < M)
    if tl.program_id(0) == 0:
        tl.store(scales[1] + j, rounding.reciprocal(column), mask=j < K)
    v = tiles.load(x, i, j)
    tiles.store(copies[0], rounding.to_float8(v * row[:, None], BIAS, SOFT), i, j, M, K)
    code = rounding.to_float8(v * column[None, :], BIAS, SOFT)
    tiles.store_transposed(copies[1], code, i, j, M, K)


@launch.kernel(BM=64, BN=64)
@triton.jit
def _transpose(
    x: tl.tensor,
    source: tl.tensor | None,
    out: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    MULTIPLE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN] of one matrix, or of the M rows that source selects, which
    # may be copied without a transpose. Moves 2 bytes per element.
    p = tiles.indices(tl.program_id(0), BM)
    j = tiles.indices(tl.program_id(1), BN)
    matrix = tl.program_id(2).to(tl.int64) * K
    columns = tl.cdiv(M, MULTIPLE) * MULTIPLE
    i = p
    is_row = p < M
    if source is not None:
        i = tl.load(source + p, mask=is_row, other=-1)
        is_row = i >= 0
    mask = is_row[:, None] & (j[None, :] < K)
    data = tl.load(x + matrix * M + i[:, None] * K + j[None, :], mask=mask, other=0)
    if TRANSPOSED:
        tiles.store(out + matrix * columns, tl.trans(data), j, p, K, columns)
    else:
        tiles.store(out, data, p, j, M, K)


@launch.kernel()
@triton.jit
def _places(
    sizes: tl.tensor, out: tl.tuple, E: tl.tensor, MULTIPLE: tl.constexpr, GROUPS: tl.constexpr
) -> None:
    # One instance: the places of one group. Moves 16 bytes per place.
    e, i = tl.program_id(0), tl.arange(0, GROUPS)
    rows = tl.load(sizes + i, mask=i < E, other=0)
    places = tl.cdiv(rows, MULTIPLE) * MULTIPLE
    begin, end = tl.sum(tl.where(i < e, places, 0)), tl.sum(tl.where(i <= e, places, 0))
    padding = tl.sum(tl.where(i < e, places - rows, 0))  # before the group
    end_of_rows = tl.sum(tl.where(i <= e, rows, 0))
    for first in range(begin, end, 1024):
        p = first + tl.arange(0, 1024)
        row = p - padding
        tl.store(out[0] + p, e, mask=p < end)
        tl.store(out[1] + p, tl.where(row < end_of_rows, row, -1), mask=p < end)
    tl.store(out[2] + e, end)


def find_scaling(
    amax: Tensor, dtype: torch.dtype, round_scales_to_power_of_2: bool = False, factor: float = 1.0
) -> Scaling:
    """Compute multipliers, and scales times a factor, in one launch; 12 bytes per amax."""
    amax, size = amax.contiguous(), amax.numel()
    multiplier, scale = torch.empty_like(amax), torch.empty_like(amax)
    _scaling(
        (launch.programs(size, _scaling.blocks["BLOCK"]),),
        *(amax, multiplier, scale, size),
        FACTOR=factor,
        POWER_OF_2=round_scales_to_power_of_2,
        BIAS=BIAS[dtype],
    )
    return multiplier, scale


launch.fused(scaling_from_amax, lambda amax, *_, **__: amax.dtype is torch.float32)(find_scaling)


def _takes(x: Tensor, *scales: Tensor) -> bool:
    """Return whether the kernels support ``x``, flattened to a matrix, with these scales."""
    if x.dtype not in DTYPES or x.ndim < 2:
        return False
    return all(not scale.ndim or scale.shape in _shapes_of_scales(x) for scale in scales)


def _shapes_of_scales(x: Tensor) -> list[tuple[int, ...]]:
    """Return the shapes of scales of rows, of columns and, unless they are empty, of matrices."""
    shapes = (*x.shape[:-1], 1), (*[1] * (x.ndim - 1), x.shape[-1]), (*x.shape[:-2], 1, 1)
    return [*shapes[: 3 if x.numel() else 2]]


def _cast_with(
    x: Tensor,
    given: Tensor,
    dtype: torch.dtype,
    transposed: Sequence[bool],
    *,
    scale: Tensor | None = None,
    power_of_2: bool = False,
    saturate: bool = False,
    amax: Tensor | None = None,
    matrix: launch.Matrix | None = None,
) -> Tensors:
    """Cast copies of a tensor with multipliers, or with amaxes.

    Args:
        given: multipliers; amaxes, if ``scale`` is given.
        scale: where to write the scales of the amaxes.
        amax: where to reduce the bits of the amax of ``x``; a 0-dim int32 zero.
        matrix: ``x`` as an argument of the kernel, if the caller has it.

    One launch; 3 bytes per bf16 element, 4 for both layouts.
    """
    copies, of, stride, rows = launch.empty_layouts(x, dtype, transposed), "tensor", 0, 1
    if given.numel() != 1:
        of = "row" if given.shape[-1] == 1 else "column"
        rows = x.shape[-2] if given.shape[-2] == 1 else 1
        given = given.flatten()
        stride = given.stride(0)
    _, M, K, *_ = argument = launch.matrix(x) if matrix is None else matrix
    _cast.repeat(
        launch.kind_of_call(x, given, *transposed, scale is None, amax is None),
        _cast.tiles(M, K),
        *(argument, given, stride, rows, launch.as_layouts(copies, transposed), amax, scale),
        OF=of,
        POWER_OF_2=power_of_2,
        SATURATE=saturate,
        **launch.float8_constants(dtype, x.device),
    )
    return copies


@launch.fused(quantization.quantize, lambda x, multiplier, dtype, **_: _takes(x, multiplier))
def _quantize(
    x: Tensor, multiplier: Tensor, dtype: torch.dtype, *, saturate: bool = True
) -> Tensor:
    return _cast_with(x, multiplier, dtype, [False], saturate=saturate)[0]


@launch.fused(quantization.cast_copies, lambda x, amaxes, *_, **__: _takes(x, *amaxes))
def _cast_copies(
    x: Tensor,
    amaxes: Sequence[Tensor],
    dtype: torch.dtype,
    round_scales_to_power_of_2: bool,
    of: Sequence[int],
    transposed: Sequence[bool],
    *,
    saturate: bool = False,
) -> Tensors:
    """Cast copies in one launch for each amax, or in one for amaxes of rows and of columns."""
    scales, power_of_2 = [torch.empty_like(amax) for amax in amaxes], round_scales_to_power_of_2
    if (
        len(amaxes) > 1
        and not saturate
        and [*zip(of, transposed, strict=True)] == [(0, False), (1, True)]
        and [tuple(amax.shape) for amax in amaxes] == _shapes_of_scales(x)[:2]
    ):
        copies = launch.empty_layouts(x, dtype, transposed)
        _cast_rows_and_columns(
            _cast_rows_and_columns.tiles(*as_matrix(x).shape),
            *(launch.matrix(x), tuple(amax.contiguous() for amax in amaxes)),
            *(launch.as_layouts(copies, transposed), tuple(scales)),
            POWER_OF_2=power_of_2,
            **launch.float8_constants(dtype, x.device),
        )
        return scales + copies
    by_place: dict[int, Tensor] = {}
    for i, (amax, scale) in enumerate(zip(amaxes, scales, strict=True)):
        mine = {n: transposed[n] for n, index in enumerate(of) if index == i}
        layouts = [*mine.values()]
        copies = _cast_with(
            x, amax, dtype, layouts, scale=scale, power_of_2=power_of_2, saturate=saturate
        )
        by_place |= zip(mine, copies, strict=True)
    return scales + [by_place[n] for n in range(len(of))]


@launch.fused(quantization.cast_tensors, lambda first, others, *_: are_alike(first, others))
def _cast_tensors(
    first: Tensor,
    others: Sequence[Tensor],
    amaxes: Tensor,
    sizes: Sequence[int],
    dtype: torch.dtype,
    round_scales_to_power_of_2: bool,
    by_row: bool = False,
) -> tuple[Tensor, Tensor]:
    """Cast in one launch; 3 bytes per bf16 element."""
    data = first.new_empty(sum(sizes), dtype=torch.uint8)
    scales = torch.empty_like(amaxes)
    tensors = first, *others
    counts = [math.prod(x.shape[:-1]) if by_row else 1 for x in tensors]
    grid, table, how = table_of(tensors, counts, sizes)
    how |= {"POWER_OF_2": round_scales_to_power_of_2, **launch.float8_constants(dtype, data.device)}
    _cast_many(grid, table, amaxes, scales, data, OF_ROWS=by_row, **how)
    return data, scales


@launch.fused(quantization.cast_fresh, lambda x, *_, **__: _takes(x))
def _cast_fresh(
    x: Tensor,
    dtype: torch.dtype,
    round_scales_to_power_of_2: bool,
    transposed: Sequence[bool],
    by_row: bool = False,
) -> Tensors:
    """Measure and cast in three launches; 5 bytes per bf16 element, 6 for both layouts.

    Scales of rows take two launches, and one if there is no transposed copy and the registers hold
    a row: 3 bytes per bf16 element.
    """
    _, M, K, _, stride_k = matrix = launch.matrix(x)
    scale = x.new_empty((*x.shape[:-1], 1) if by_row else (), dtype=torch.float32)
    power_of_2 = round_scales_to_power_of_2
    if not by_row or True in transposed or K > _WIDEST or stride_k != 1:
        amax = amax_of_matrix(x, covered_dims("row", x.ndim) if by_row else None, matrix)
        copies = _cast_with(
            x, amax, dtype, transposed, scale=scale, power_of_2=power_of_2, matrix=matrix
        )
    else:
        copies = launch.empty_layouts(x, dtype, transposed)
        amax = torch.empty_like(scale)
        BN = triton.next_power_of_2(max(K, 16))
        BM = max(1, _WIDEST // 2 // BN)
        _cast_rows.repeat(
            launch.kind_of_call(x),
            (launch.programs(M, BM), 1),
            *(matrix, copies[0], (amax, scale)),
            POWER_OF_2=power_of_2,
            **launch.float8_constants(dtype, x.device),
            **{"BM": BM, "BN": BN},
        )
    return [amax, scale, *copies]


@launch.fused(quantization.cast_and_measure, lambda x, *_, **__: _takes(x))
def _cast_and_measure(
    x: Tensor,
    known: Tensor,
    dtype: torch.dtype,
    round_scales_to_power_of_2: bool,
    transposed: Sequence[bool],
) -> Tensors:
    """Cast and measure in three launches; 3 bytes per bf16 element, 4 for both layouts."""
    scale, power_of_2 = torch.empty_like(known), round_scales_to_power_of_2
    bits = torch.zeros((), dtype=torch.int32, device=x.device)
    copies = _cast_with(
        x, known, dtype, transposed, scale=scale, power_of_2=power_of_2, saturate=True, amax=bits
    )
    amax = bits.view(torch.float32)
    return [amax, torch.add(scale, amax, alpha=0), *copies]  # NaN if the amax is not finite


@launch.fused(quantization.transposed_copy, lambda x, *_: x.is_contiguous())
def _transposed_copy(x: Tensor, multiple: int = ALIGNMENT) -> Tensor:
    """Transpose matrices in one launch; 2 bytes per element."""
    *others, M, K = x.shape
    out = quantization.empty_transposed(x, multiple)
    _transpose.repeat(
        launch.kind_of_call(x),
        (*_transpose.tiles(out.shape[-1], K), math.prod(others)),
        *(x, None, out, M, K),
        MULTIPLE=multiple,
        TRANSPOSED=True,
    )
    return out


@launch.fused(rows_of_groups, lambda x, *_: x.is_contiguous())
def _rows_of_groups(x: Tensor, source: Tensor, transposed: bool) -> Tensor:
    """Copy rows in one launch; 2 bytes per element."""
    (P,), K = source.shape, x.shape[1]
    out = x.new_empty((K, P) if transposed else (P, K))
    arguments = x, source, out, P, K
    _transpose(_transpose.tiles(P, K), *arguments, MULTIPLE=1, TRANSPOSED=transposed)
    return out


@launch.fused(places_of_groups, lambda sizes, *_: 0 < len(sizes) <= 4096)
def _places_of_groups(sizes: Tensor, count: int, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out groups in one launch; 16 bytes per place."""
    results, groups = empty_places(sizes, count, multiple), len(sizes)
    power = triton.next_power_of_2(groups)
    _places((groups,), sizes.contiguous(), results, groups, MULTIPLE=multiple, GROUPS=power)
    return results
