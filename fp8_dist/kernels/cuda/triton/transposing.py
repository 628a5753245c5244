"""Transposed copies of float8 data, such as gathered weights, tile by tile."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton.launch import (
    Blocks,
    as_bytes,
    blocks,
    fused,
    size_class,
    tuned,
)
from fp8_dist.kernels.cuda.triton.rounding import indices, store_tile
from fp8_dist.kernels.transposing import MOST, transposed_copies, transposed_copy


@tuned(blocks(4, BM=64, BN=64), blocks(4, BM=128, BN=64), blocks(8, BM=128, BN=128))
@triton.jit
def _transpose(
    xs: tl.tuple,
    outs: tl.tuple,
    rows: tl.tuple,
    columns: tl.tuple,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN] of one of the matrices. Moves 2 bytes per element.
    tile = tl.program_id(0)
    x, out = xs[0].to(tl.int64), outs[0].to(tl.int64)
    M, K = tl.cast(rows[0], tl.int64), tl.cast(columns[0], tl.int64)
    first = tile * 0  # first tile of this matrix
    start = first  # first tile of the n-th matrix
    for n in tl.static_range(1, len(xs)):
        start += tl.cdiv(rows[n - 1], BM) * tl.cdiv(columns[n - 1], BN)
        is_past = tile >= start
        x = tl.where(is_past, xs[n].to(tl.int64), x)
        out = tl.where(is_past, outs[n].to(tl.int64), out)
        M = tl.where(is_past, rows[n], M)
        K = tl.where(is_past, columns[n], K)
        first = tl.where(is_past, start, first)
    x, out = x.to(tl.pointer_type(tl.uint8)), out.to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        x, out = tl.multiple_of(x, 16), tl.multiple_of(out, 16)
        M, K = tl.multiple_of(M, 16), tl.multiple_of(K, 16)
    across = tl.cdiv(K, BN)
    i = indices((tile - first) // across, BM)
    j = indices((tile - first) % across, BN)
    mask = (i[:, None] < M) & (j[None, :] < K)
    data = tl.load(x + i[:, None] * K + j[None, :], mask=mask, other=0)
    store_tile(out, tl.trans(data), j, i, K, M)


@fused(transposed_copy, lambda x: x.is_contiguous())
def _transposed_copy(x: torch.Tensor) -> torch.Tensor:
    """Transpose a matrix in one launch; 2 bytes per element."""
    return _transposed_copies(x, [])[0]


@fused(transposed_copies, lambda first, others: all(x.is_contiguous() for x in (first, *others)))
def _transposed_copies(first: torch.Tensor, others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Transpose matrices in one launch per 16 of them; 2 bytes per element.

    Their addresses are arguments of the kernel instead of a table on the device, because gathered
    weights have other addresses in each step.
    """
    matrices = [first, *others]
    outs = [x.new_empty(x.shape[::-1]) for x in matrices]
    for n in range(0, len(matrices), MOST):
        _launch(matrices[n : n + MOST], outs[n : n + MOST])
    return outs


def _launch(matrices: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    rows, columns = tuple(len(x) for x in matrices), tuple(x.shape[1] for x in matrices)

    def tiles(chosen: Blocks) -> int:
        each = zip(rows, columns, strict=True)
        return sum(triton.cdiv(M, chosen["BM"]) * triton.cdiv(K, chosen["BN"]) for M, K in each)

    if not sum(x.numel() for x in matrices):
        return
    starts = [x.data_ptr() for x in (*matrices, *outs)]
    _transpose(
        lambda chosen: (tiles(chosen),),
        (size_class(len(rows), sum(x.numel() for x in matrices)),),
        matrices[0].device,
        *(tuple(map(as_bytes, matrices)), tuple(map(as_bytes, outs))),
        *(rows, columns),
        ALIGNED=all(n % 16 == 0 for n in (*starts, *rows, *columns)),
    )
