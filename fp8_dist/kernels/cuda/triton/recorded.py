"""Casts by a scale that was known before, with the amax that a later scale is taken from."""

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.results import RecordedCast
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
    saturated,
    store_tile,
    to_float8,
)
from fp8_dist.kernels.cuda.zeros import zero


@tuned(blocks(4, BM=64, BN=64), blocks(8, BM=64, BN=128), blocks(8, BM=128, BN=64))
@triton.jit
def _cast_and_amax(
    x: tl.tensor,
    multiplier: tl.tensor,
    qdata: tl.tensor,
    qdata_t: tl.tensor,
    amax: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    stride_m: tl.tensor,
    stride_k: tl.tensor,
    ROW_MAJOR: tl.constexpr,
    COLUMN_MAJOR: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN]. Moves the bytes of x once, and 1 byte per element a layout.
    i = indices(tl.program_id(0), BM)
    j = indices(tl.program_id(1), BN)
    v = load_tile(x, i, j, M, K, stride_m, stride_k)
    tl.atomic_max(amax, tl.max(tl.max(magnitude(v), 1), 0))
    code = to_float8(saturated(v * tl.load(multiplier), BIAS), BIAS, SOFT)
    if ROW_MAJOR:
        store_tile(qdata, code, i, j, M, K)
    if COLUMN_MAJOR:
        store_tile(qdata_t, tl.trans(code), j, i, K, M)


@tuned(blocks(1))
@triton.jit
def _record(
    amax: tl.tensor,
    scale: tl.tensor,
    recorded: tl.tensor,
    poisoned: tl.tensor,
    largest: tl.tensor,
    KNOWN: tl.constexpr,
) -> None:
    # The only instance. Moves a few numbers.
    value = tl.load(amax)
    tl.store(poisoned, tl.load(scale) + value * 0.0)
    bits = magnitude(value)
    if KNOWN:
        bits = tl.maximum(bits, magnitude(tl.load(recorded)))
    tl.store(largest, bits)


def cast_and_record(
    x: torch.Tensor,
    multiplier: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    recorded: torch.Tensor | None,
    *,
    row_major: bool = True,
    column_major: bool = False,
) -> RecordedCast:
    """A matrix in float8 by a known multiplier, with its amax.

    Args:
        x: ``[M, K]``, bf16, fp16 or fp32, any strides.
        multiplier, scale: fp32, 0-dim.
        dtype: a float8 dtype.
        recorded: the largest amax up to now, fp32, 0-dim; ``None``: none.
        row_major: whether to write ``qdata``.
        column_major: whether to write ``qdata_t``.

    Two launches; 3 bytes per bf16 element, 4 for both layouts.
    """
    M, K = x.shape
    amax = zero(x.device)
    qdata = empty_bytes(row_major, x, M, K)
    qdata_t = empty_bytes(column_major, x, K, M)
    _cast_and_amax(
        lambda chosen: (programs(M, chosen["BM"]), programs(K, chosen["BN"])),
        (x.dtype, size_class(M, K), x.stride(1) == 1, row_major, column_major),
        x.device,
        *(x, multiplier, qdata, qdata_t, amax.view(torch.int32), M, K, *x.stride()),
        ROW_MAJOR=row_major,
        COLUMN_MAJOR=column_major,
        **float8_constants(dtype, x.device),
    )
    poisoned, largest = (torch.empty((), dtype=torch.float32, device=x.device) for _ in range(2))
    _record(
        lambda chosen: (1,),
        (),
        x.device,
        *(amax, scale, recorded, poisoned, largest.view(torch.int32)),
        KNOWN=recorded is not None,
    )
    layouts = as_float8(qdata, dtype), as_float8(qdata_t, dtype)
    return RecordedCast(*layouts, amax, poisoned, largest)
