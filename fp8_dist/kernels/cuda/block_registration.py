"""Implementations of the block operators on CUDA devices, by the kernels of this package.

Inputs that the kernels do not support use the portable implementations: dtypes other than bf16,
fp16 and fp32, blocks of several rows in more than two dims, and block sizes that are large or not
powers of two.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from fp8_dist.kernels import cuda
from fp8_dist.kernels.block_casts import (
    block_exponents_of_each,
    cast_blocks,
    of_each,
    quantize_block_copies,
    quantize_blocks_of_each,
)
from fp8_dist.kernels.block_gemm import block_scaled_mm
from fp8_dist.kernels.blocks import block_exponents, exponents_shape, quantize_blocks, reblock
from fp8_dist.kernels.copies import Tensors
from fp8_dist.kernels.cuda.block_gemm import block_mm
from fp8_dist.kernels.transposing import transposed, transposed_copy

# A tile of whole blocks must fit into registers.
_LONGEST, _LARGEST = 256, 128 * 128


def _block_exponents(
    x: torch.Tensor, dtype: torch.dtype, blocks: Sequence[int], rule: str | None
) -> torch.Tensor:
    if not _takes(x, blocks):
        return block_exponents.portable(x, dtype, blocks, rule)
    exponents = cuda.block_exponents(_matrix(x), dtype, blocks, rule)
    return exponents.view(exponents_shape(x.shape, blocks))


def _quantize_blocks(
    x: torch.Tensor,
    exponents: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    if not _takes(x, blocks):
        return quantize_blocks.portable(x, exponents, dtype, blocks)
    qdata = cuda.quantize_blocks(_matrix(x), _matrix(exponents), dtype, blocks).qdata
    assert qdata is not None
    return qdata.view(x.shape)


def _cast_blocks(
    x: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    rule: str | None,
    transposed: Sequence[bool],
) -> Tensors:
    if not _takes(x, blocks):
        return cast_blocks.portable(x, dtype, blocks, rule, transposed)
    layouts = {"row_major": False in transposed, "column_major": True in transposed}
    made = cuda.cast_blocks(_matrix(x), dtype, blocks, rule, **layouts)
    exponents = made.exponents.view(exponents_shape(x.shape, blocks))
    return [exponents, *_copies(x, made.qdata, made.qdata_t, transposed)]


def _quantize_block_copies(
    x: torch.Tensor,
    exponents: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    transposed: Sequence[bool],
) -> Tensors:
    if not _takes(x, blocks):
        return quantize_block_copies.portable(x, exponents, dtype, blocks, transposed)
    layouts = {"row_major": False in transposed, "column_major": True in transposed}
    made = cuda.quantize_blocks(_matrix(x), _matrix(exponents), dtype, blocks, **layouts)
    return _copies(x, made.qdata, made.qdata_t, transposed)


def _copies(
    x: torch.Tensor,
    qdata: torch.Tensor | None,
    qdata_t: torch.Tensor | None,
    transposed: Sequence[bool],
) -> Tensors:
    made = {False: None if qdata is None else qdata.view(x.shape), True: qdata_t}
    copies = [made[turned] for turned in transposed]
    return [each for each in copies if each is not None]


def _reblock(
    qdata: torch.Tensor,
    exponents: torch.Tensor,
    blocks: Sequence[int],
    rows: int,
    rule: str | None,
    transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not (_fits(*blocks[:2]) and _fits(rows, blocks[1])):
        return reblock.portable(qdata, exponents, blocks, rows, rule, transposed)
    return cuda.reblock(qdata, exponents, blocks, rows, rule, transposed)


def _block_exponents_of_each(
    first: torch.Tensor,
    others: Sequence[torch.Tensor],
    dtype: torch.dtype,
    blocks: Sequence[int],
    rule: str | None,
) -> torch.Tensor:
    tensors, each = [first, *others], of_each(blocks)
    if not _are_alike(tensors, each):
        return block_exponents_of_each.portable(first, others, dtype, blocks, rule)
    return cuda.exponents_of_many(tensors, dtype, each, rule)


def _quantize_blocks_of_each(
    first: torch.Tensor,
    others: Sequence[torch.Tensor],
    exponents: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
) -> torch.Tensor:
    tensors, each = [first, *others], of_each(blocks)
    if not _are_alike(tensors, each):
        return quantize_blocks_of_each.portable(first, others, exponents, dtype, blocks)
    return cuda.quantize_many_blocks(tensors, exponents.contiguous(), dtype, each)


def _are_alike(tensors: Sequence[torch.Tensor], blocks: Sequence[Sequence[int]]) -> bool:
    """Whether one launch can process all of the tensors."""
    dtype, size = tensors[0].dtype, blocks[0][:2]
    return all(
        x.ndim == 2 and x.dtype is dtype and x.is_contiguous() and _takes(x, of) and of[:2] == size
        for x, of in zip(tensors, blocks, strict=True)
    )


def _takes(x: torch.Tensor, blocks: Sequence[int]) -> bool:
    of_matrix = x.ndim == 2 or blocks[0] == 1
    return x.dtype in cuda.DTYPES and of_matrix and _fits(*blocks[:2])


def _fits(rows: int, columns: int) -> bool:
    are_powers = not (rows & (rows - 1) or columns & (columns - 1))
    return are_powers and max(rows, columns) <= _LONGEST and rows * columns <= _LARGEST


def _matrix(x: torch.Tensor) -> torch.Tensor:
    if x.ndim == 2:
        return x
    return x.flatten(0, -2) if x.ndim > 2 else x.unsqueeze(0)


def _block_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    exponents_a: torch.Tensor,
    exponents_b: torch.Tensor,
    blocks_a: Sequence[int],
    blocks_b: Sequence[int],
    out_dtype: torch.dtype,
    emulate: bool,
    *,
    transpose: Callable[[torch.Tensor], torch.Tensor] = transposed_copy,
) -> torch.Tensor:
    operands = (a, b, exponents_a, exponents_b, blocks_a, blocks_b, out_dtype)
    product = None if emulate else block_mm(*operands, transpose)
    if product is not None:
        return product
    if not (_fits(*blocks_a[:2]) and _fits(*blocks_b[:2])):
        return block_scaled_mm.portable(*operands, emulate)
    wide = torch.bfloat16 if out_dtype is torch.bfloat16 else torch.float32
    left = cuda.dequantize(a, exponents_a, blocks_a, wide)
    right = cuda.dequantize(b, exponents_b, blocks_b, wide)
    with torch.autocast(a.device.type, enabled=False):
        return torch.mm(left, right).to(out_dtype)


def register_block_kernels() -> None:
    """Register the block kernels."""
    block_exponents.register("cuda", _block_exponents)
    quantize_blocks.register("cuda", _quantize_blocks)
    cast_blocks.register("cuda", _cast_blocks)
    quantize_block_copies.register("cuda", _quantize_block_copies)
    block_exponents_of_each.register("cuda", _block_exponents_of_each)
    quantize_blocks_of_each.register("cuda", _quantize_blocks_of_each)
    reblock.register("cuda", _reblock)
    eager = partial(_block_scaled_mm, transpose=transposed)
    block_scaled_mm.register("cuda", _block_scaled_mm, direct=eager)
