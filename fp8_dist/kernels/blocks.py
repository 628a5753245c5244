"""Block scales: powers of two, stored as exponents of one byte each, or fp32 scales.

The last two dims of a tensor form a matrix, which is cut into blocks of ``rows x columns`` values.
A part of a larger matrix may begin and end inside of blocks. So blocks are described by four
numbers, ``(rows, columns, first_row, first_column)``. The last two are the position, within its
first block, at which the part begins. Blocks of one row apply to tensors with any number of dims.

An exponent is an e8m0 byte (OCP Microscaling Formats v1.0): ``scale = 2 ** (byte - 127)``, and 255
is NaN. It is stored as uint8, because compilers do not support e8m0. :func:`exponents_of` computes
the exponent of a block by one of these rules:

* ``"ceil"``: ``ceil(log2(amax / fp8_max))``. No value saturates.
* ``"floor"``: ``floor(log2(amax)) - floor(log2(fp8_max))``, the rule of the standard above (section
  6.3). If the amax is above ``fp8_max`` times that power of two, the largest values saturate.
* ``None``: the power of two of :mod:`fp8_dist.kernels.scale`. This is *ceil* with an epsilon: an
  amax below 1e-12 counts as 1e-12.

A block with a non-finite value has the exponent NaN. The values of a block with the smallest
exponent, the byte 0, become zeros. The dtype of a cast is a float8 dtype, or ``E2M1_X2`` for values
of four bits in e4m3 data, whose exponents have rules of their own
(:mod:`fp8_dist.kernels.e2m1`).

An fp32 scale, as in FP8 checkpoints and inference engines, is ``max(amax, 1e-10) / fp8_max``, and
``qdata = saturate(x / scale)``, both computed in fp32 as in vLLM's ``per_token_group_quant_fp8``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8_dist.kernels import e2m1
from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.kernels.e2m1 import E2M1_X2, data_dtype
from fp8_dist.kernels.quantization import (
    Tensors,
    as_matrix,
    empty_copies,
    empty_transposed,
    padded,
    transposed_copy,
)
from fp8_dist.kernels.scale import magnitudes, scaling_from_amax

NAN_EXPONENT = 255
_BIAS = 127
_EPS = 1e-10  # of fp32 scales


def blocks_along(size: int, block: int, first: int) -> int:
    """Number of blocks along a dim of ``size`` values that begins at ``first`` within a block."""
    return -(-(first + size) // block) if size else 0


def exponents_shape(shape: Sequence[int], blocks: Sequence[int]) -> list[int]:
    """The shape of the exponents of a tensor: ``[..., R, C]``."""
    rows, columns, first_row, first_column = blocks
    *others, last = shape
    if rows > 1:
        others[-1] = blocks_along(others[-1], rows, first_row)
    return [*others, blocks_along(last, columns, first_column)]


def in_blocks(x: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """Reshape a tensor to its blocks, padded with zeros: ``[..., R, rows, C, columns]``.

    The result is a view if the tensor is contiguous and its blocks need no padding.
    """
    rows, columns, first_row, first_column = blocks
    *others, last = x.shape
    count = blocks_along(last, columns, first_column)
    missing = [first_column, count * columns - first_column - last]
    if rows > 1:
        row_count = blocks_along(others[-1], rows, first_row)
        missing += first_row, row_count * rows - first_row - others[-1]
        others[-1:] = row_count, rows
    else:
        others.append(1)
    return padded(x, missing).reshape(*others, count, columns)


def expanded(values: torch.Tensor, shape: Sequence[int], blocks: Sequence[int]) -> torch.Tensor:
    """Expand one value per block to one per element of a tensor of ``shape``.

    A dim with a single block keeps size 1, and is left to broadcasting.
    """
    rows, columns, first_row, first_column = blocks
    for dim, block, first in ((-1, columns, first_column), (-2, rows, first_row)):
        if block > 1 and values.shape[dim] != 1:
            values = values.repeat_interleave(block, dim=dim)
            values = values.narrow(dim, first if shape[dim] else 0, shape[dim])
    return values


def powers_of_2(exponents: torch.Tensor) -> torch.Tensor:
    """Convert exponents to scales: fp32, NaN for the byte 255."""
    return exponents.view(torch.float8_e8m0fnu).to(torch.float32)


def fp32_scales(scales: torch.Tensor) -> torch.Tensor:
    """Convert stored scales to fp32: exponents, or floats."""
    return powers_of_2(scales) if scales.dtype is torch.uint8 else scales.to(torch.float32)


def empty_exponents(x: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """Allocate the exponents of a tensor's blocks, uninitialized."""
    return x.new_empty(exponents_shape(x.shape, blocks), dtype=torch.uint8)


@custom_op(fake=lambda x, dtype, blocks, rule: empty_exponents(x, blocks))
def block_exponents(
    x: torch.Tensor, dtype: torch.dtype, blocks: Sequence[int], rule: str | None
) -> torch.Tensor:
    """Compute the exponents of the blocks of a local tensor.

    Args:
        x: ``[..., M, K]``, floating point.
        dtype, blocks, rule: see :mod:`fp8_dist.kernels.blocks`.

    Returns:
        The exponents, uint8, of shape :func:`exponents_shape`.
    """
    return exponents_of(block_amaxes(x, blocks), dtype, rule)


@custom_op(
    fake=lambda x, blocks: x.new_empty(exponents_shape(x.shape, blocks), dtype=torch.float32)
)
def block_amaxes(x: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """Compute the amaxes of the blocks of a local tensor: fp32, 0 for a block without values."""
    shape = exponents_shape(x.shape, blocks)
    if not x.numel():
        return x.new_zeros(shape, dtype=torch.float32)
    bits = magnitudes(in_blocks(x, blocks))
    # Reducing a dim of size 1 costs as much as reducing a long one.
    dims = [dim for dim in (-1, -3) if bits.shape[dim] > 1]
    largest = bits.amax(dims) if dims else bits
    return largest.view(shape).view(x.dtype).to(torch.float32)


def exponents_of(amax: torch.Tensor, dtype: torch.dtype, rule: str | None) -> torch.Tensor:
    """Compute the exponents, uint8, of blocks from their amaxes (fp32, any shape)."""
    if rule is None:
        _, scale = scaling_from_amax(amax, dtype, True)
        # For inf and NaN these bits are all ones, which is the byte of NaN.
        return (scale.view(torch.int32) >> 23).to(torch.uint8)
    largest = 6.0 if dtype is E2M1_X2 else torch.finfo(dtype).max
    if rule == "ceil" and dtype is not E2M1_X2:
        # The logarithm is fp32, as in torchao: if an amax exceeds fp8_max times a power of two by a
        # few steps of fp32 (22 at most), the logarithm rounds down to that power. The quotient is
        # computed in fp64, because a GPU divides an fp32 tensor by a number by multiplying by the
        # number's reciprocal. Rounded to fp32, the fp64 quotient equals the fp32 quotient.
        quotient = (amax.to(torch.float64) / largest).to(torch.float32)
        exponents = torch.log2(quotient).ceil_().add_(_BIAS).clamp_(min=0)
        return exponents.nan_to_num_(NAN_EXPONENT, NAN_EXPONENT).to(torch.uint8)
    bits, carry = amax.view(torch.int32), e2m1.CARRIES[rule] if dtype is E2M1_X2 else 0
    exponents = ((bits + carry) >> 23).sub_(math.floor(math.log2(largest))).clamp_(min=0)
    return exponents.masked_fill_(bits >> 23 == NAN_EXPONENT, NAN_EXPONENT).to(torch.uint8)


@custom_op(fake=lambda x, exponents, dtype, *how: empty_copies(x, data_dtype(dtype), how[-1]))
def quantize_block_copies(
    x: torch.Tensor,
    exponents: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    transposed: Sequence[bool],
) -> Tensors:
    """Cast copies of ``saturate(float32(x) / scale)`` to ``dtype``, with one scale per block.

    The values of a block with the byte 0 as its exponent become 0.

    Args:
        x: ``[..., M, K]``, floating point.
        exponents: exponents of the blocks of ``x``.
        transposed: layout of each copy (see :mod:`fp8_dist.kernels.quantization`).

    Returns:
        The copies, contiguous. One that is not transposed has the shape of ``x``.
    """
    # The reciprocal of a power of two is exact. The scale of the byte 0 is replaced by infinity.
    scales = torch.threshold_(powers_of_2(exponents), 2.0**-_BIAS, math.inf)
    multiplier = scales.reciprocal_()
    product = scaled_by(x.to(torch.float32), multiplier, blocks)
    if dtype is E2M1_X2:
        product = e2m1.round_to_e2m1(product)
    else:
        limit = torch.finfo(dtype).max
        product.clamp_(-limit, limit)
    qdata = product.to(data_dtype(dtype), memory_format=torch.contiguous_format)
    return [transposed_copy(as_matrix(qdata)) if t else qdata for t in transposed]


@custom_op()
def pack_blocks(x: torch.Tensor, exponents: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """Cast ``[..., K]`` as :func:`quantize_block_copies` does, and pack: uint8 ``[..., K / 2]``."""
    (qdata,) = quantize_block_copies(x, exponents, E2M1_X2, blocks, [False])
    return e2m1.pack_e2m1(qdata)


@custom_op()
def cast_tensors_in_blocks(
    first: torch.Tensor,
    others: Sequence[torch.Tensor],
    exponents: torch.Tensor | None,
    dtype: torch.dtype,
    blocks: Sequence[int],
    *,
    rule: str | None = None,
    packed: bool = False,
) -> torch.Tensor:
    """Cast many local tensors of one dtype with given exponents, or compute these.

    Args:
        exponents: flat, of one tensor after the other.
        packed: pack the data, as :func:`pack_blocks` does.

    Returns:
        The data of all tensors, uint8, flat. Without ``exponents``, these, computed by ``rule``.
    """
    tensors, data = (first, *others), []
    if exponents is None:
        return torch.cat([block_exponents(x, dtype, blocks, rule).view(-1) for x in tensors])
    shapes = [exponents_shape(x.shape, blocks) for x in tensors]
    parts = exponents.split([math.prod(shape) for shape in shapes])
    for x, part, shape in zip(tensors, parts, shapes, strict=True):
        (qdata,) = quantize_block_copies(x, part.view(shape), dtype, blocks, [False])
        data.append(e2m1.pack_e2m1(qdata) if packed else qdata.view(torch.uint8))
    return torch.cat([each.view(-1) for each in data])


def scaled_by(
    x: torch.Tensor,
    scales: torch.Tensor,
    blocks: Sequence[int],
    operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.mul,
) -> torch.Tensor:
    """Multiply a tensor by one scale per block; the result has the shape and dtype of ``x``.

    ``operation``: the operation to apply instead of a multiplication.
    """
    rows, columns, first_row, first_column = blocks
    in_parts = first_row or first_column or x.shape[-1] % columns
    in_parts = in_parts or (rows > 1 and x.shape[-2] % rows)
    if x.is_contiguous() and not in_parts:
        wide = scales.unsqueeze(-2).unsqueeze(-1).to(x.dtype)
        return operation(in_blocks(x, blocks), wide).view(x.shape)
    return operation(x, expanded(scales.to(x.dtype), x.shape, blocks))


@custom_op()
def fp32_block_scales(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute the scales of blocks from their amaxes (fp32, any shape).

    A non-finite amax gives a non-finite scale.
    """
    # A GPU divides an fp32 tensor by a number by multiplying by the number's reciprocal. Rounded to
    # fp32, the fp64 quotient equals the fp32 quotient.
    return (amax.clamp(min=_EPS).to(torch.float64) / torch.finfo(dtype).max).to(torch.float32)


@custom_op(fake=lambda x, scales, dtype, *_: x.new_empty(x.shape, dtype=dtype))
def quantize_by_scales(
    x: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, blocks: Sequence[int]
) -> torch.Tensor:
    """Cast a local tensor ``[..., M, K]`` with one fp32 scale per block; contiguous."""
    limit = torch.finfo(dtype).max
    quotient = scaled_by(x.to(torch.float32), scales, blocks, torch.div)
    return quotient.clamp_(-limit, limit).to(dtype, memory_format=torch.contiguous_format)


@custom_op()
def dequantize_blocks(
    x: torch.Tensor, scales: torch.Tensor, blocks: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Multiply float8 data by its block scales (exponents or fp32), in a wider dtype.

    The result has the memory layout of ``x``, which may be of that dtype already. With exponents it
    is exact, except for values that are subnormal in bf16.
    """
    if x.ndim == 2 and not x.is_contiguous() and x.t().is_contiguous():
        rows, columns, first_row, first_column = blocks
        blocks = columns, rows, first_column, first_row
        return dequantize_blocks(x.t(), scales.t(), blocks, dtype).t()
    return scaled_by(x.to(dtype), fp32_scales(scales), blocks)


@custom_op()
def cast_blocks(
    x: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    rule: str | None,
    transposed: Sequence[bool],
) -> Tensors:
    """Compute the block exponents of a local tensor, and cast its copies with them.

    Args:
        x, dtype, blocks, rule: as in :func:`block_exponents`.
        transposed: layout of each copy (see :mod:`fp8_dist.kernels.quantization`).

    Returns:
        The exponents, followed by the copies.
    """
    exponents = block_exponents(x, dtype, blocks, rule)
    return [exponents, *quantize_block_copies(x, exponents, dtype, blocks, transposed)]


def empty_reblocked(qdata: torch.Tensor, *how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results of :func:`reblock` with these arguments, uninitialized."""
    _, _, rows, _, transposed = how
    data = empty_transposed(qdata, rows) if transposed else qdata.new_empty(qdata.shape)
    return data, empty_exponents(qdata, (rows, 1, 0, 0))


@custom_op(fake=empty_reblocked)
def reblock(
    qdata: torch.Tensor,
    exponents: torch.Tensor,
    blocks: Sequence[int],
    rows: int,
    rule: str | None,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast float8 data to blocks of ``rows`` values of a column, for the GEMM that contracts rows.

    Scaling by powers of two changes only exponents. So a value is rounded only if it is below the
    normal range of its new scale: less than 2 ** -14 times the largest value of its block.

    Args:
        qdata: float8, ``[M, K]``.
        exponents: the exponents of its blocks.
        rows: number of rows of the new blocks. The first block begins at the first row.
        rule: rule of the new exponents. *floor* would let float8 values saturate again.
        transposed: return the data as ``[K, P]``, for a GEMM that reads it transposed. P is M
            rounded up to whole blocks, with zeros in the columns from M on.

    Returns:
        The data, ``[M, K]`` of the dtype of ``qdata``, and the exponents of the new blocks
        ``(rows, 1, 0, 0)``.
    """
    values, columns = dequantize_blocks(qdata, exponents, blocks, torch.float32), (rows, 1, 0, 0)
    if transposed:
        values = padded(values, (0, 0, 0, -len(values) % rows))
    new_exponents = block_exponents.portable(values, qdata.dtype, columns, rule)
    how = new_exponents, qdata.dtype, columns, [False]
    (data,) = quantize_block_copies.portable(values, *how)
    return data.t().contiguous() if transposed else data, new_exponents


@custom_op()
def amaxes_of_groups(values: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    """Compute the amax of each column of each group of rows, 0 if empty: fp32 ``[groups, K]``.

    ``values``: fp32 ``[M, K]``. ``group``: int64 ``[M]``, the group of each row.
    """
    bits = magnitudes(values)
    largest = bits.new_zeros(groups, values.shape[1])
    largest.scatter_reduce_(0, group.unsqueeze(1).expand_as(bits), bits, "amax")
    return largest.view(torch.float32)
