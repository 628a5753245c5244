"""Blocks without Triton: the portable implementations, called as the kernels are."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from fp8_dist.kernels import blocks as portable_blocks
from fp8_dist.kernels.block_casts import quantize_blocks_of_each
from fp8_dist.kernels.block_gemm import dequantized
from fp8_dist.kernels.cuda.operators import note_no_triton
from fp8_dist.kernels.cuda.results import BlockCast, Layouts


def cast_blocks(
    x: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    floor: bool,
    *,
    row_major: bool = True,
    column_major: bool = False,
) -> BlockCast:
    """A matrix in float8 with scales of blocks: their exponents and the cast."""
    exponents = block_exponents(x, dtype, blocks, floor)
    layouts = {"row_major": row_major, "column_major": column_major}
    return BlockCast(*quantize_blocks(x, exponents, dtype, blocks, **layouts), exponents)


def block_exponents(
    x: torch.Tensor, dtype: torch.dtype, blocks: Sequence[int], floor: bool
) -> torch.Tensor:
    """:func:`fp8_dist.kernels.block_exponents` of a matrix."""
    note_no_triton(x)
    return portable_blocks.block_exponents.portable(x, dtype, blocks, floor)


def quantize_blocks(
    x: torch.Tensor,
    exponents: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    *,
    row_major: bool = True,
    column_major: bool = False,
) -> Layouts:
    """:func:`fp8_dist.kernels.quantize_blocks` of a matrix, in one layout or both."""
    note_no_triton(x)
    qdata = portable_blocks.quantize_blocks.portable(x, exponents, dtype, blocks)
    return Layouts(qdata if row_major else None, qdata.t().contiguous() if column_major else None)


def exponents_of_many(
    matrices: Sequence[torch.Tensor],
    dtype: torch.dtype,
    blocks: Sequence[Sequence[int]],
    floor: bool,
) -> torch.Tensor:
    """The exponents of the blocks of many matrices: flat, one after the other."""
    each = zip(matrices, blocks, strict=True)
    return torch.cat([block_exponents(x, dtype, of, floor).view(-1) for x, of in each])


def quantize_many_blocks(
    matrices: Sequence[torch.Tensor],
    exponents: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Many matrices in float8 with scales of blocks: flat, one after the other."""
    note_no_triton(matrices[0])
    flat = [number for of in blocks for number in of]
    return quantize_blocks_of_each.portable(matrices[0], matrices[1:], exponents, dtype, flat)


def reblock(
    qdata: torch.Tensor,
    exponents: torch.Tensor,
    blocks: Sequence[int],
    rows: int,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fp8_dist.kernels.reblock`."""
    note_no_triton(qdata)
    return portable_blocks.reblock.portable(qdata, exponents, blocks, rows, transposed)


def dequantize(
    qdata: torch.Tensor, exponents: torch.Tensor, blocks: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Float8 data in blocks as bf16 or fp32."""
    return dequantized(qdata, exponents, blocks, dtype)


def gemm_scales(exponents: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """The scales of exponents ``[R, C]`` with one column after the other in memory, fp32.

    R is rounded up to a multiple, by zeros.
    """
    scales = portable_blocks.powers_of_2(exponents)
    return pad(scales, (0, 0, 0, -len(scales) % multiple)).t().contiguous().t()


def tiled_exponents(exponents: torch.Tensor, repeats: int = 1) -> torch.Tensor:
    """``[M, C]`` as Blackwell reads it: flat, in tiles of 128 x 4, padded with zeros.

    ``exponents``: ``[M / repeats, C]``; each row is repeated.
    """
    rows = exponents.repeat_interleave(repeats, dim=0)
    whole = pad(rows, (0, -rows.shape[1] % 4, 0, -len(rows) % 128))
    tiles = whole.view(-1, 4, 32, whole.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
