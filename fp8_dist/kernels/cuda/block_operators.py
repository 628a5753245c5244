"""Block scales without Triton: the portable implementations, with the kernels' signatures."""

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
    rule: str | None,
    *,
    row_major: bool = True,
    column_major: bool = False,
) -> BlockCast:
    """Compute the block exponents of a matrix and cast it to float8."""
    exponents = block_exponents(x, dtype, blocks, rule)
    layouts = {"row_major": row_major, "column_major": column_major}
    return BlockCast(*quantize_blocks(x, exponents, dtype, blocks, **layouts), exponents)


def block_exponents(
    x: torch.Tensor, dtype: torch.dtype, blocks: Sequence[int], rule: str | None
) -> torch.Tensor:
    """:func:`fp8_dist.kernels.block_exponents` of a matrix."""
    note_no_triton(x)
    return portable_blocks.block_exponents.portable(x, dtype, blocks, rule)


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
    rule: str | None,
) -> torch.Tensor:
    """Block exponents of many matrices, flat, one matrix after the other."""
    each = zip(matrices, blocks, strict=True)
    return torch.cat([block_exponents(x, dtype, of, rule).view(-1) for x, of in each])


def quantize_many_blocks(
    matrices: Sequence[torch.Tensor],
    exponents: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Cast many matrices to float8 with block scales, flat, one matrix after the other."""
    note_no_triton(matrices[0])
    flat = [number for of in blocks for number in of]
    return quantize_blocks_of_each.portable(matrices[0], matrices[1:], exponents, dtype, flat)


def reblock(
    qdata: torch.Tensor,
    exponents: torch.Tensor,
    blocks: Sequence[int],
    rows: int,
    rule: str | None,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fp8_dist.kernels.reblock`."""
    note_no_triton(qdata)
    return portable_blocks.reblock.portable(qdata, exponents, blocks, rows, rule, transposed)


def dequantize(
    qdata: torch.Tensor, exponents: torch.Tensor, blocks: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize float8 data with block scales to bf16 or fp32."""
    return dequantized(qdata, exponents, blocks, dtype)


def gemm_scales(
    a: torch.Tensor, b: torch.Tensor, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of the exponents of two operands, fp32, column-major.

    The rows of ``b`` are padded with zeros to a multiple of ``multiple``.
    """
    of_a, of_b = portable_blocks.powers_of_2(a), portable_blocks.powers_of_2(b)
    of_b = pad(of_b, (0, 0, 0, -len(b) % multiple))
    return of_a.t().contiguous().t(), of_b.t().contiguous().t()


def tiled_exponents(
    a: torch.Tensor, b: torch.Tensor, repeats: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponents of two operands in the layout of Blackwell; each row of ``b`` is repeated."""
    return _in_tiles(a), _in_tiles(b.repeat_interleave(repeats, dim=0))


def _in_tiles(exponents: torch.Tensor) -> torch.Tensor:
    rows, columns = exponents.shape
    whole = pad(exponents, (0, -columns % 4, 0, -rows % 128))
    tiles = whole.view(-1, 4, 32, whole.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
