"""Kernels as they were before a static bound was written for them, each of which it must refuse."""

from typing import Any

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton import amaxes, folded
from fp8_dist.kernels.cuda.triton.folded import UNIT, _g0
from fp8_dist.kernels.cuda.triton.launch import (
    Tuned,
    blocks,
    float8_constants,
    matrix,
    tiles,
    tuned,
)
from fp8_dist.kernels.cuda.triton.rounding import (
    indices,
    load_tile,
    magnitude,
    store_tile,
    to_float8,
)

M, K = 8192, 4096


@tuned(blocks(4, BM=64, BN=64))
@triton.jit
def _ordered_amax(x: tl.tuple, amax: tl.tensor, BM: tl.constexpr, BN: tl.constexpr) -> None:
    # The atomic orders all accesses of memory around it.
    v = load_tile(x, indices(tl.program_id(0), BM), indices(tl.program_id(1), BN))
    tl.atomic_max(amax, tl.max(tl.max(magnitude(v), 1), 0))


@tuned(blocks(4, BM=16, BN=128), blocks(8, BM=16, BN=256))
@triton.jit
def _columns_of_each_tile(
    grad: tl.tuple,
    multiplier: tl.tensor,
    input_scale: tl.tensor,
    column_amax: tl.tensor,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # Warps find the maximum of a column together, in each step.
    M, N = grad[1], grad[2]
    i = indices(tl.program_id(0), BM)
    m = tl.load(multiplier + i, mask=i < M, other=1.0)
    t = tl.load(input_scale + i, mask=i < M, other=0.0) * UNIT
    for block in range(tl.cdiv(N, BN)):
        j = indices(block, BN)
        g0 = _g0(grad, m, i, j, BIAS, SOFT)
        largest = tl.max(magnitude(g0 * t[:, None]), 0)
        tl.atomic_max(column_amax + j, largest, mask=j < N, sem="relaxed")


@tuned(blocks(4, BM=64, BN=64))
@triton.jit
def _approximate(
    x: tl.tuple, scale: tl.tensor, out: tl.tensor, BM: tl.constexpr, BN: tl.constexpr
) -> None:
    # The operator / is not rounded to nearest.
    i, j = indices(tl.program_id(0), BM), indices(tl.program_id(1), BN)
    store_tile(out, load_tile(x, i, j) / tl.load(scale), i, j, x[1], x[2])


@tuned(blocks(4, BM=64, BN=64), blocks(8, BM=128, BN=64))
@triton.jit
def _unpadded(x: tl.tuple, out: tl.tensor, BM: tl.constexpr, BN: tl.constexpr) -> None:
    # Rows of the transposed copy are as long as there are tokens, whose number is odd.
    i, j = indices(tl.program_id(0), BM), indices(tl.program_id(1), BN)
    code = to_float8(load_tile(x, i, j), 7, False)
    store_tile(out, tl.trans(code), j, i, x[2], x[1])


def call_former(run: Any) -> None:
    """Launch every kernel; see :func:`compile_kernels.call_all`."""
    e4m3, cpu = torch.float8_e4m3fn, torch.device("cpu")
    x, rows, columns = torch.empty(M, K).bfloat16(), torch.empty(M), torch.empty(K)
    bits = columns.view(torch.int32)
    _ordered_amax(tiles(M, K), (), cpu, matrix(x), bits)
    _columns_of_each_tile(
        *(tiles(M, K), (), cpu, matrix(x), rows, rows, bits), **float8_constants(e4m3, cpu)
    )
    _approximate(tiles(M, K), (), cpu, matrix(x), rows, torch.empty(M, K))
    narrow = Tuned(amaxes._tiles.kernel, (blocks(4, BM=16, BN=128), blocks(8, BM=32, BN=128)))
    wide = Tuned(folded._fold_rows.kernel, (blocks(4, BM=8, BN=2048),))
    narrow(tiles(M, K), (), cpu, matrix(x), None, bits, None, STEPS=8)
    out = torch.empty(M, K, dtype=torch.uint8)
    constants = {"STEPS": 8, **float8_constants(e4m3, cpu)}
    wide(tiles(M, K), (), cpu, matrix(x), (rows, rows), columns, rows, out, bits, **constants)
    _unpadded(tiles(M, K), (), cpu, matrix(x[1:]), out)
