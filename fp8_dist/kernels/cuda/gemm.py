"""Float8 GEMMs on GPUs. Two kinds of devices have a GEMM with block scales:

* Hopper multiplies blocks of 1 x 128 by blocks of 128 x 128 or of 1 x 128, with fp32 scales.
* Blackwell multiplies blocks of 1 x 32 (MX), with e8m0 scales in tiles of 128 x 4.

The layouts follow the checks of torch's ``scaled_mm``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType
from torch.nn.functional import scaled_mm as scaled_mm_of_torch

from fp8_dist.gemm_table import BLOCK_RECIPES, block_of_gemm, has_gemm
from fp8_dist.kernels.gemm import block_scaled_mm, in_tiles, row_major, trimmed_to_same_depth
from fp8_dist.kernels.quantization import ALIGNMENT, padded, rounded_up
from fp8_dist.text import warn_once


def _block_scaled_mm(
    a: Tensor,
    b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    blocks_a: Sequence[int],
    blocks_b: Sequence[int],
    out_dtype: torch.dtype,
    emulate: bool,
) -> Tensor:
    """Run the device's GEMM with block scales, or portable code if it can't take the operands."""
    obstacle = None if emulate else _obstacle(a, b, scales_a, blocks_a, blocks_b, out_dtype)
    if obstacle is not None and has_gemm("scaled", a.device):
        warn_once(
            f"GEMM of blocks {obstacle}",
            f"float8 GEMM of {tuple(a.shape)} by {tuple(b.shape)} with one scale per block of "
            f"{max(blocks_a[:2])} values: it runs in high precision, no faster than without "
            f"float8; {obstacle}",
        )
    if emulate or obstacle is not None:
        operands = a, b, scales_a, scales_b, blocks_a, blocks_b
        return block_scaled_mm.portable(*operands, out_dtype, emulate)
    rows, columns = a.shape[0], b.shape[1]
    a, b = trimmed_to_same_depth(a, b)
    a = _with_whole_rows(row_major(_in_whole_blocks(a, blocks_a)))
    b = row_major(_in_whole_blocks(b, blocks_b).t()).t()
    scaling = _hopper_scaling if block_of_gemm(a.device) == 128 else _blackwell_scaling
    product = scaled_mm_of_torch(
        a, b, *scaling(scales_a, scales_b, blocks_b), output_dtype=out_dtype
    )
    if product.shape == (rows, columns):
        return product
    first_column = blocks_b[3]
    return product[:rows, first_column : first_column + columns].contiguous()


def _obstacle(
    a: Tensor,
    b: Tensor,
    scales_a: Tensor,
    blocks_a: Sequence[int],
    blocks_b: Sequence[int],
    out_dtype: torch.dtype,
) -> str | None:
    """Return the reason why the device does not multiply operands in float8; None if it does."""
    block = block_of_gemm(a.device)
    if block is None:
        return "this device, or this build of torch, has no such GEMM; use rowwise_folded"
    if max(blocks_a[:2]) != block:
        return f"this device multiplies blocks of {block} values; use {BLOCK_RECIPES[block]}"
    if b.shape[1] % ALIGNMENT:
        return f"the layer's features must be multiples of {ALIGNMENT}"
    rows, columns, _, first = blocks_a
    others_rows, others_columns, others_first, _ = blocks_b
    fits = (
        (block == 128 or scales_a.dtype is torch.uint8)
        and a.dtype is b.dtype is torch.float8_e4m3fn
        and out_dtype in (torch.bfloat16, torch.float32)
        and (rows, columns, others_rows) == (1, block, block)
        and others_columns in (1, block)
        and first == others_first  # blocks of both begin at the same indices of the contracted dim
        and min(*a.shape, *b.shape) > 0
    )
    return None if fits else "the device's GEMM does not take these dtypes or shapes of blocks"


def _in_whole_blocks(x: Tensor, blocks: Sequence[int]) -> Tensor:
    """Pad a matrix with zeros to whole blocks."""
    rows, columns, first_row, first_column = blocks
    right, below = -(first_column + x.shape[1]) % columns, -(first_row + x.shape[0]) % rows
    return padded(x, (first_column, right, first_row, below))


def _with_whole_rows(x: Tensor) -> Tensor:
    """Extend to a multiple of ``ALIGNMENT`` rows; added rows hold any values. Copy only if needed.

    Casts leave memory for these (:func:`fp8_dist.kernels.cuda.triton.launch.empty_layouts`).
    """
    rows, columns = rounded_up(x.shape[0]), x.shape[1]
    if rows == x.shape[0]:
        return x
    if (x.storage_offset() + rows * columns) * x.itemsize <= x.untyped_storage().nbytes():
        return x.as_strided((rows, columns), (columns, 1))
    return padded(x, (0, 0, 0, rows - x.shape[0]))


# The last arguments of torch's scaled_mm: scales and recipe of each operand, and both swizzles.
_Scaling = tuple[Tensor, Any, Tensor, Any, Any, Any]


def _hopper_scaling(scales_a: Tensor, scales_b: Tensor, blocks_b: Sequence[int]) -> _Scaling:
    """Lay out the scales for Hopper's GEMM.

    The scales of ``a`` are ``[M, K / 128]``, with M rounded up as in the data. Those of ``b`` are
    ``[N, K / 128]`` for blocks of one column, and ``[L, N / 128]`` for square blocks, where L is
    ``K / 128`` rounded up to a multiple of 4. The first dim of all of them is contiguous in memory.
    """
    recipe = recipe_b = ScalingType.BlockWise1x128
    if blocks_b[1] == 1:
        scales_b = scales_b.t()
    else:
        scales_b = padded(scales_b, (0, 0, 0, -len(scales_b) % 4))
        recipe_b = ScalingType.BlockWise128x128
    # Scales of the added rows stay uninitialized; their rows of the product are dropped.
    scales_a = _column_major(scales_a, rounded_up(len(scales_a)))
    scales_b = _column_major(scales_b, len(scales_b))
    return scales_a, recipe, scales_b, recipe_b, SwizzleType.NO_SWIZZLE, SwizzleType.NO_SWIZZLE


def _column_major(scales: Tensor, rows: int) -> Tensor:
    """Convert scales to fp32 with contiguous columns of ``rows`` values, in one launch."""
    out = scales.new_empty((scales.shape[1], rows), dtype=torch.float32)
    values = scales.view(torch.float8_e8m0fnu) if scales.dtype is torch.uint8 else scales
    out[:, : len(scales)].copy_(values.t())
    return out.t()


def _blackwell_scaling(scales_a: Tensor, scales_b: Tensor, blocks_b: Sequence[int]) -> _Scaling:
    """Lay out the scales for Blackwell's GEMM.

    The scales are tiled exponents of rows of ``a`` and of columns of ``b``. The exponents of a
    square block are repeated for each of its columns.
    """
    scales_b = scales_b.t().repeat_interleave(blocks_b[1], dim=0)
    tiles_a, tiles_b = (in_tiles(s).view(torch.float8_e8m0fnu) for s in (scales_a, scales_b))
    recipe, swizzle = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    return tiles_a, recipe, tiles_b, recipe, swizzle, swizzle


block_scaled_mm.register("cuda", _block_scaled_mm)
