"""Block scales in the layouts that GEMMs read: one launch for both operands."""

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton.block_tiles import scales_by
from fp8_dist.kernels.cuda.triton.launch import blocks, programs, tuned
from fp8_dist.kernels.cuda.triton.rounding import indices


@triton.jit
def _scales_of(
    exponents: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    padded: tl.tensor,
    size: tl.tensor,
    stride_r: tl.tensor,
    stride_c: tl.tensor,
    block: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    # BLOCK scales, one column after the other.
    n = indices(block, BLOCK)
    r, c = n % padded, n // padded
    is_block = (n < size) & (r < rows)
    found = tl.load(exponents + r * stride_r + c * stride_c, mask=is_block, other=0).to(tl.int32)
    tl.store(scales + n, tl.where(is_block, scales_by(found), 0.0), mask=n < size)


@tuned(blocks(4, BLOCK=1024))
@triton.jit
def _gemm_scales(
    a: tl.tensor,
    scales_a: tl.tensor,
    rows_a: tl.tensor,
    size_a: tl.tensor,
    stride_ar: tl.tensor,
    stride_ac: tl.tensor,
    b: tl.tensor,
    scales_b: tl.tensor,
    rows_b: tl.tensor,
    padded_b: tl.tensor,
    size_b: tl.tensor,
    stride_br: tl.tensor,
    stride_bc: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    # One instance: BLOCK scales of one operand. Moves 5 bytes each.
    block, of_a = tl.program_id(0), tl.cdiv(size_a, BLOCK)
    if block < of_a:
        _scales_of(a, scales_a, rows_a, rows_a, size_a, stride_ar, stride_ac, block, BLOCK)
    else:
        block -= of_a
        _scales_of(b, scales_b, rows_b, padded_b, size_b, stride_br, stride_bc, block, BLOCK)


@triton.jit
def _tiles_of(
    exponents: tl.tensor,
    tiles: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    repeats: tl.tensor,
    stride_r: tl.tensor,
    stride_c: tl.tensor,
    block: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    # BLOCK bytes of tiles.
    n, across = indices(block, BLOCK), tl.cdiv(columns, 4)
    tile = n // 512
    r = tile // across * 128 + n % 16 // 4 * 32 + n % 512 // 16
    c = tile % across * 4 + n % 4
    is_block = (r < rows * repeats) & (c < columns)
    found = tl.load(exponents + r // repeats * stride_r + c * stride_c, mask=is_block, other=0)
    tl.store(tiles + n, found, mask=tile < tl.cdiv(rows * repeats, 128) * across)


@tuned(blocks(4, BLOCK=1024))
@triton.jit
def _tiled_exponents(
    a: tl.tensor,
    tiles_a: tl.tensor,
    rows_a: tl.tensor,
    columns_a: tl.tensor,
    size_a: tl.tensor,
    stride_ar: tl.tensor,
    stride_ac: tl.tensor,
    b: tl.tensor,
    tiles_b: tl.tensor,
    rows_b: tl.tensor,
    columns_b: tl.tensor,
    repeats_b: tl.tensor,
    stride_br: tl.tensor,
    stride_bc: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    # One instance: BLOCK bytes of the tiles of one operand. Moves 2 bytes each.
    block, of_a = tl.program_id(0), tl.cdiv(size_a, BLOCK)
    if block < of_a:
        _tiles_of(a, tiles_a, rows_a, columns_a, 1, stride_ar, stride_ac, block, BLOCK)
    else:
        block -= of_a
        _tiles_of(b, tiles_b, rows_b, columns_b, repeats_b, stride_br, stride_bc, block, BLOCK)


def gemm_scales(
    a: torch.Tensor, b: torch.Tensor, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of the exponents ``[R, C]`` of two operands, column-major.

    Args:
        a, b: exponents, any strides.
        multiple: the rows of ``b`` are padded with zeros to a multiple of this.

    Returns:
        The scales of both, fp32 ``[R, C]`` with strides ``(1, R)``.

    One launch; 5 bytes per block.
    """
    padded = -(-b.shape[0] // multiple) * multiple
    shapes = (a.shape[1], a.shape[0]), (b.shape[1], padded)
    of_a, of_b = (torch.empty(s, dtype=torch.float32, device=a.device) for s in shapes)
    _gemm_scales(
        lambda chosen: (_programs(of_a, of_b, chosen["BLOCK"]),),
        (),
        a.device,
        *(a, of_a, a.shape[0], of_a.numel(), *a.stride()),
        *(b, of_b, b.shape[0], padded, of_b.numel(), *b.stride()),
    )
    return of_a.t(), of_b.t()


def tiled_exponents(
    a: torch.Tensor, b: torch.Tensor, repeats: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponents ``[R, C]`` of two operands in the layout of Blackwell.

    The results are flat, in tiles of 128 x 4, padded with zeros. A tile has 32 rows of 16 bytes.
    Row i has 4 bytes of each of the rows i, i + 32, i + 64 and i + 96 of exponents.

    Args:
        a, b: exponents, any strides.
        repeats: number of times that each row of ``b`` is repeated.

    One launch; 2 bytes per exponent in the tiles.
    """
    sizes = [
        triton.cdiv(rows, 128) * triton.cdiv(columns, 4) * 512
        for rows, columns in (a.shape, (b.shape[0] * repeats, b.shape[1]))
    ]
    of_a, of_b = (torch.empty(size, dtype=torch.uint8, device=a.device) for size in sizes)
    _tiled_exponents(
        lambda chosen: (_programs(of_a, of_b, chosen["BLOCK"]),),
        (),
        a.device,
        *(a, of_a, *a.shape, of_a.numel(), *a.stride()),
        *(b, of_b, *b.shape, repeats, *b.stride()),
    )
    return of_a, of_b


def _programs(of_a: torch.Tensor, of_b: torch.Tensor, block: int) -> int:
    return triton.cdiv(of_a.numel(), block) + programs(of_b.numel(), block)
