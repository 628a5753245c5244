"""Tiles of matrices: their indices, loads and stores.

A kernel takes a matrix as the tuple of :func:`fp8_dist.kernels.cuda.triton.launch.matrix`, and its
output copies as the pair of :func:`fp8_dist.kernels.cuda.triton.launch.as_layouts`.
"""

import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton import rounding


@triton.jit
def load(x: tl.tuple, i: tl.tensor, j: tl.tensor) -> tl.tensor:
    """Load ``x[i, j]`` of a matrix argument as fp32, 0 outside of it; i and j are int64."""
    data, M, K, stride_m, stride_k = x
    offsets = i[:, None] * stride_m + j[None, :] * stride_k
    mask = (i[:, None] < M) & (j[None, :] < K)
    return rounding.as_fp32(tl.load(data + offsets, mask=mask, other=0.0))


@triton.jit
def store(
    out: tl.tensor, tile: tl.tensor, i: tl.tensor, j: tl.tensor, rows: tl.tensor, columns: tl.tensor
) -> None:
    """Store ``out[i, j] = tile`` in a contiguous ``[rows, columns]``; i and j are int64."""
    mask = (i[:, None] < rows) & (j[None, :] < columns)
    tl.store(out + i[:, None] * columns + j[None, :], tile, mask=mask)


@triton.jit
def store_transposed(
    out: tl.tensor,
    tile: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    MAY_BE_NEGATIVE: tl.constexpr = False,
) -> None:
    """Store a tile of ``[M, K]`` in a transposed copy, with zeros up to a multiple of 16 columns.

    ``MAY_BE_NEGATIVE``: i and j may be negative, where nothing is stored.
    """
    columns = tl.cdiv(M, 16) * 16
    if columns != M:
        tile = tl.where(i[:, None] < M, tile, 0)
    down, across = j < K, i < columns
    if MAY_BE_NEGATIVE:
        down, across = down & (j >= 0), across & (i >= 0)
    places = j[:, None] * columns + i[None, :]
    tl.store(out + places, tl.trans(tile), mask=down[:, None] & across[None, :])


@triton.jit
def indices(block: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return the indices of a block along one dim, int64."""
    return tl.cast(block, tl.int64) * SIZE + tl.arange(0, SIZE)
