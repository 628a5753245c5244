"""Two casts of an operand, with a scale per row and with a scale per column, in two passes."""

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.results import Cast
from fp8_dist.kernels.cuda.triton.launch import (
    blocks,
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
    store_tile,
    to_float8,
)
from fp8_dist.torch_internals import foreach_zero_


@tuned(blocks(4, BM=64, BN=64), blocks(8, BM=64, BN=128), blocks(8, BM=128, BN=128))
@triton.jit
def _amaxes(
    x: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    stride_m: tl.tensor,
    stride_k: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN]. Moves the bytes of x once.
    i = indices(tl.program_id(0), BM)
    j = indices(tl.program_id(1), BN)
    bits = magnitude(load_tile(x, i, j, M, K, stride_m, stride_k))
    tl.atomic_max(rows + i, tl.max(bits, 1), mask=i < M, sem="relaxed")
    tl.atomic_max(columns + j, tl.max(bits, 0), mask=j < K, sem="relaxed")


@tuned(
    blocks(4, BM=64, BN=64),
    blocks(8, BM=64, BN=128),
    blocks(8, BM=128, BN=64),
    blocks(4, BM=32, BN=128),
)
@triton.jit
def _casts(
    x: tl.tensor,
    row_amax: tl.tensor,
    column_amax: tl.tensor,
    by_rows: tl.tensor,
    by_columns_t: tl.tensor,
    row_multiplier: tl.tensor,
    row_scale: tl.tensor,
    column_multiplier: tl.tensor,
    column_scale: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    stride_m: tl.tensor,
    stride_k: tl.tensor,
    POWER_OF_2: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN]. Moves the bytes of x once, and 2 bytes per element.
    i = indices(tl.program_id(0), BM)
    j = indices(tl.program_id(1), BN)
    row = multiplier_of(tl.load(row_amax + i, mask=i < M, other=1.0), POWER_OF_2, BIAS)
    column = multiplier_of(tl.load(column_amax + j, mask=j < K, other=1.0), POWER_OF_2, BIAS)
    if tl.program_id(1) == 0:
        tl.store(row_multiplier + i, row, mask=i < M)
        tl.store(row_scale + i, reciprocal(row), mask=i < M)
    if tl.program_id(0) == 0:
        tl.store(column_multiplier + j, column, mask=j < K)
        tl.store(column_scale + j, reciprocal(column), mask=j < K)
    v = load_tile(x, i, j, M, K, stride_m, stride_k)
    store_tile(by_rows, to_float8(v * row[:, None], BIAS, SOFT), i, j, M, K)
    code = to_float8(v * column[None, :], BIAS, SOFT)
    store_tile(by_columns_t, tl.trans(code), j, i, K, M)


def amax_of_rows_and_columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Amaxes of the rows, ``[M, 1]``, and of the columns, ``[1, K]``, of a matrix ``[M, K]``.

    Two launches; 2 bytes per bf16 element.
    """
    M, K = x.shape
    # Two allocations and one fill: an operator may not return two views of one buffer.
    rows = torch.empty(M, 1, dtype=torch.float32, device=x.device)
    columns = torch.empty(1, K, dtype=torch.float32, device=x.device)
    foreach_zero_([rows, columns])
    _amaxes(
        lambda chosen: (programs(M, chosen["BM"]), programs(K, chosen["BN"])),
        (x.dtype, size_class(M, K), x.stride(1) == 1),
        x.device,
        *(x, rows.view(torch.int32), columns.view(torch.int32), M, K, *x.stride()),
    )
    return rows, columns


def cast_rows_and_columns(
    x: torch.Tensor,
    row_amax: torch.Tensor,
    column_amax: torch.Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
) -> tuple[Cast, Cast]:
    """Cast a matrix to float8 twice, with a scale per row and with a scale per column.

    Args:
        x: ``[M, K]``, bf16, fp16 or fp32, any strides.
        row_amax: ``[M, 1]``.
        column_amax: ``[1, K]``.
        dtype: a float8 dtype.
        power_of_2: round multipliers down to powers of two.

    Returns:
        The cast by rows, which has only ``qdata``, and the cast by columns, which has only
        ``qdata_t``. The GEMMs of a linear layer that apply such scales read these layouts.

    One launch; 4 bytes per bf16 element.
    """
    M, K = x.shape
    device = x.device
    rows = [torch.empty(M, 1, dtype=torch.float32, device=device) for _ in range(2)]
    columns = [torch.empty(1, K, dtype=torch.float32, device=device) for _ in range(2)]
    qdata = torch.empty(M, K, dtype=dtype, device=device)
    qdata_t = torch.empty(K, M, dtype=dtype, device=device)
    _casts(
        lambda chosen: (programs(M, chosen["BM"]), programs(K, chosen["BN"])),
        (x.dtype, size_class(M, K), x.stride(1) == 1),
        device,
        *(x, row_amax.contiguous(), column_amax.contiguous()),
        *(qdata.view(torch.uint8), qdata_t.view(torch.uint8), *rows, *columns),
        *(M, K, *x.stride()),
        POWER_OF_2=power_of_2,
        **float8_constants(dtype, device),
    )
    return Cast(qdata, None, *rows), Cast(None, qdata_t, *columns)
