"""The scales of blocks as the GEMMs of devices read them: one launch for an operand."""

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton.block_tiles import scales_by
from fp8_dist.kernels.cuda.triton.launch import blocks, programs, tuned
from fp8_dist.kernels.cuda.triton.rounding import indices


@tuned(blocks(4, BLOCK=1024))
@triton.jit
def _gemm_scales(
    exponents: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    padded: tl.tensor,
    size: tl.tensor,
    stride_r: tl.tensor,
    stride_c: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    # One instance: BLOCK scales, of one column after the other. Moves 5 bytes each.
    n = indices(tl.program_id(0), BLOCK)
    r, c = n % padded, n // padded
    is_block = (n < size) & (r < rows)
    found = tl.load(exponents + r * stride_r + c * stride_c, mask=is_block, other=0).to(tl.int32)
    tl.store(scales + n, tl.where(is_block, scales_by(found), 0.0), mask=n < size)


@tuned(blocks(4, BLOCK=1024))
@triton.jit
def _tiled_exponents(
    exponents: tl.tensor,
    tiles: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    across: tl.tensor,
    repeats: tl.tensor,
    size: tl.tensor,
    stride_r: tl.tensor,
    stride_c: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    # One instance: BLOCK bytes of the tiles. Moves 2 bytes each.
    n = indices(tl.program_id(0), BLOCK)
    tile = n // 512
    r = tile // across * 128 + n % 16 // 4 * 32 + n % 512 // 16
    c = tile % across * 4 + n % 4
    is_block = (n < size) & (r < rows) & (c < columns)
    found = tl.load(exponents + r // repeats * stride_r + c * stride_c, mask=is_block, other=0)
    tl.store(tiles + n, found, mask=n < size)


def gemm_scales(exponents: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """The scales of exponents ``[R, C]``, with one column after the other in memory.

    Args:
        exponents: any strides.
        multiple: of this the number of rows becomes a multiple, by zeros.

    Returns:
        fp32, ``[R, C]`` with strides ``(1, R)``; R is the multiple.

    One launch; 5 bytes per block.
    """
    rows, columns = exponents.shape
    padded = -(-rows // multiple) * multiple
    scales = torch.empty(columns, padded, dtype=torch.float32, device=exponents.device)
    size = scales.numel()
    _gemm_scales(
        lambda chosen: (programs(size, chosen["BLOCK"]),),
        (),
        exponents.device,
        *(exponents, scales, rows, padded, size, *exponents.stride()),
    )
    return scales.t()


def tiled_exponents(exponents: torch.Tensor, repeats: int = 1) -> torch.Tensor:
    """``[M, C]`` as Blackwell reads it: flat, in tiles of 128 x 4, padded with zeros.

    A tile has 32 rows of 16 bytes: those of rows i, i + 32, i + 64 and i + 96, 4 bytes of each.

    Args:
        exponents: ``[M / repeats, C]``, any strides.
        repeats: how often each row is repeated.

    One launch; 2 bytes per exponent in the tiles.
    """
    rows, columns = exponents.shape[0] * repeats, exponents.shape[1]
    across = triton.cdiv(columns, 4)
    size = triton.cdiv(rows, 128) * across * 512
    tiles = torch.empty(size, dtype=torch.uint8, device=exponents.device)
    _tiled_exponents(
        lambda chosen: (programs(size, chosen["BLOCK"]),),
        (),
        exponents.device,
        *(exponents, tiles, rows, columns, across, repeats, size, *exponents.stride()),
    )
    return tiles
