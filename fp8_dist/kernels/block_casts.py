"""Casts with block scales: several memory layouts from one pass, or many tensors at once.

Exponents and blocks are defined in :mod:`fp8_dist.kernels.blocks`, *transposed* copies in
:mod:`fp8_dist.kernels.copies`.
"""

import math
from collections.abc import Sequence

import torch

from fp8_dist.kernels.blocks import block_exponents, exponents_shape, quantize_blocks
from fp8_dist.kernels.copies import Tensors, empty_copies
from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.kernels.transposing import transposed_copy


@custom_op(
    "cast_blocks(Tensor x, ScalarType dtype, int[] blocks, str? rule, bool[] transposed) "
    "-> Tensor[]"
)
def cast_blocks(
    x: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    rule: str | None,
    transposed: Sequence[bool],
) -> Tensors:
    """Compute the block exponents of a local tensor, and cast its copies with them.

    Args:
        x, dtype, blocks, rule: as in :func:`fp8_dist.kernels.block_exponents`.
        transposed: layout of each copy.

    Returns:
        The exponents, followed by the copies.
    """
    exponents = block_exponents(x, dtype, blocks, rule)
    return [exponents, *quantize_block_copies(x, exponents, dtype, blocks, transposed)]


@custom_op(
    "quantize_block_copies(Tensor x, Tensor exponents, ScalarType dtype, int[] blocks, "
    "bool[] transposed) -> Tensor[]"
)
def quantize_block_copies(
    x: torch.Tensor,
    exponents: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    transposed: Sequence[bool],
) -> Tensors:
    """:func:`fp8_dist.kernels.quantize_blocks` for several copies, each in its own layout."""
    qdata = quantize_blocks(x, exponents, dtype, blocks)
    matrix = qdata if x.ndim == 2 else qdata.view(math.prod(x.shape[:-1]), x.shape[-1])
    return [transposed_copy(matrix) if turned else qdata for turned in transposed]


@custom_op(
    "block_exponents_of_each(Tensor first, Tensor[] others, ScalarType dtype, int[] blocks, "
    "str? rule) -> Tensor"
)
def block_exponents_of_each(
    first: torch.Tensor,
    others: Sequence[torch.Tensor],
    dtype: torch.dtype,
    blocks: Sequence[int],
    rule: str | None,
) -> torch.Tensor:
    """:func:`fp8_dist.kernels.block_exponents` of each of many local matrices on one device.

    Args:
        blocks: four numbers for each matrix.

    Returns:
        The exponents of all matrices, uint8, flat, one matrix after the other.
    """
    each = zip((first, *others), of_each(blocks), strict=True)
    return torch.cat([block_exponents(x, dtype, of, rule).view(-1) for x, of in each])


@custom_op(
    "quantize_blocks_of_each(Tensor first, Tensor[] others, Tensor exponents, ScalarType dtype, "
    "int[] blocks) -> Tensor"
)
def quantize_blocks_of_each(
    first: torch.Tensor,
    others: Sequence[torch.Tensor],
    exponents: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
) -> torch.Tensor:
    """:func:`fp8_dist.kernels.quantize_blocks` of each of many local matrices on one device.

    Args:
        exponents: the result of :func:`block_exponents_of_each`.
        blocks: as in :func:`block_exponents_of_each`.

    Returns:
        The data of all matrices, flat, one after the other.
    """
    tensors, each = (first, *others), of_each(blocks)
    shapes = [exponents_shape(x.shape, of) for x, of in zip(tensors, each, strict=True)]
    parts = exponents.split([math.prod(shape) for shape in shapes])
    data = [
        quantize_blocks(x, part.view(shape), dtype, of).view(torch.uint8).view(-1)
        for x, part, shape, of in zip(tensors, parts, shapes, each, strict=True)
    ]
    return torch.cat(data).view(dtype)


def of_each(blocks: Sequence[int]) -> list[Sequence[int]]:
    """Split flat numbers into the blocks of each matrix."""
    return [blocks[n : n + 4] for n in range(0, len(blocks), 4)]


@cast_blocks.register_fake
def _cast_blocks_fake(
    x: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    rule: str | None,
    transposed: Sequence[bool],
) -> Tensors:
    exponents = x.new_empty(exponents_shape(x.shape, blocks), dtype=torch.uint8)
    return [exponents, *empty_copies(x, dtype, transposed)]


@quantize_block_copies.register_fake
def _quantize_block_copies_fake(
    x: torch.Tensor,
    exponents: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    transposed: Sequence[bool],
) -> Tensors:
    return empty_copies(x, dtype, transposed)


@block_exponents_of_each.register_fake
def _block_exponents_of_each_fake(
    first: torch.Tensor,
    others: Sequence[torch.Tensor],
    dtype: torch.dtype,
    blocks: Sequence[int],
    rule: str | None,
) -> torch.Tensor:
    each = zip((first, *others), of_each(blocks), strict=True)
    count = sum(math.prod(exponents_shape(x.shape, of)) for x, of in each)
    return first.new_empty(count, dtype=torch.uint8)


@quantize_blocks_of_each.register_fake
def _quantize_blocks_of_each_fake(
    first: torch.Tensor,
    others: Sequence[torch.Tensor],
    exponents: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
) -> torch.Tensor:
    return first.new_empty(sum(x.numel() for x in (first, *others)), dtype=dtype)


def fuses_blocks(x: torch.Tensor) -> bool:
    """Whether :func:`cast_blocks` reads the tensor once on this device."""
    return x.is_cuda
