"""Block scales in fp32, as FP8 checkpoints and inference engines have them.

``scale = max(amax, 1e-10) / fp8_max`` in fp32, correctly rounded. A cast has one of two forms,
which differ in some codes:

* ``saturate(x / scale)``: vLLM (``per_token_group_quant_fp8``).
* ``saturate(x * (1 / scale))``: slime, verl and SGLang (``blockwise_cast_to_fp8``).

Both are computed in fp32. Blocks are described as in :mod:`fp8_dist.kernels.blocks`.
"""

from collections.abc import Sequence

import torch

from fp8_dist.kernels.blocks import (
    amaxes_of_groups,
    block_amaxes,
    exponents_shape,
    scaled_by,
)
from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.kernels.quantization import empty_transposed, transposed_copy

EPS = 1e-10


def scales_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute the scales of blocks from their amaxes (fp32, any shape).

    A non-finite amax gives a non-finite scale.
    """
    # A GPU divides an fp32 tensor by a number by multiplying by the number's reciprocal. Rounded to
    # fp32, the fp64 quotient equals the fp32 quotient.
    return (amax.clamp(min=EPS).to(torch.float64) / torch.finfo(dtype).max).to(torch.float32)


@custom_op(
    "quantize_by_scales(Tensor x, Tensor scales, ScalarType dtype, int[] blocks, bool divides) "
    "-> Tensor",
    fake=lambda x, scales, dtype, *_: x.new_empty(x.shape, dtype=dtype),
)
def quantize_by_scales(
    x: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
    divides: bool,
) -> torch.Tensor:
    """Cast a local tensor with one fp32 scale per block.

    Args:
        x: ``[..., M, K]``, floating point.
        scales: the scales of the blocks of ``x``.
        divides: whether values are divided by the scale. Otherwise they are multiplied by its
            reciprocal.

    Returns:
        A contiguous tensor of the shape of ``x``.
    """
    high, limit = x.to(torch.float32), torch.finfo(dtype).max
    if divides:
        quotient = scaled_by(high, scales, blocks, torch.div)
    else:
        quotient = scaled_by(high, scales.reciprocal(), blocks)
    return quotient.clamp_(-limit, limit).to(dtype, memory_format=torch.contiguous_format)


@custom_op(
    "reblock_by_scales(Tensor qdata, Tensor scales, int[] blocks, int rows, bool divides, "
    "bool transposed=False) -> (Tensor, Tensor)",
    fake=lambda qdata, scales, blocks, rows, divides, transposed=False: (
        empty_transposed(qdata, rows) if transposed else qdata.new_empty(qdata.shape),
        scales.new_empty(exponents_shape(qdata.shape, (rows, 1, 0, 0))),
    ),
)
def reblock_by_scales(
    qdata: torch.Tensor,
    scales: torch.Tensor,
    blocks: Sequence[int],
    rows: int,
    divides: bool,
    transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast float8 data to blocks of ``rows`` values of a column, for the GEMM that contracts rows.

    This rounds the values a second time, because the new scales are not powers of two times the old
    ones. Arguments and results are those of :func:`fp8_dist.kernels.blocks.reblock`, with fp32
    scales in place of exponents.
    """
    values, columns = scaled_by(qdata.to(torch.float32), scales, blocks), (rows, 1, 0, 0)
    found = scales_of(block_amaxes(values, columns), qdata.dtype)
    data = quantize_by_scales.portable(values, found, qdata.dtype, columns, divides)
    return transposed_copy(data, rows) if transposed else data, found


@custom_op(
    "amaxes_of_groups(Tensor qdata, Tensor scales, int[] blocks, Tensor group, int groups) "
    "-> Tensor",
    fake=lambda qdata, scales, blocks, group, groups: scales.new_empty(groups, qdata.shape[1]),
)
def dequantized_amaxes(
    qdata: torch.Tensor,
    scales: torch.Tensor,
    blocks: Sequence[int],
    group: torch.Tensor,
    groups: int,
) -> torch.Tensor:
    """Compute the amaxes of new blocks, fp32 ``[groups, K]``, that may have rows on several ranks.

    Arguments are those of :func:`fp8_dist.kernels.blocks.exponents_of_groups`.
    """
    values = scaled_by(qdata.to(torch.float32), scales, blocks)
    return amaxes_of_groups(values, group, groups)


@custom_op(
    "reblock_groups_by_scales(Tensor qdata, Tensor scales, int[] blocks, Tensor group, "
    "Tensor of_groups, bool divides) -> (Tensor, Tensor)",
    fake=lambda qdata, scales, *_: (
        qdata.new_empty(qdata.shape),
        scales.new_empty(qdata.shape),
    ),
)
def reblock_groups_by_scales(
    qdata: torch.Tensor,
    scales: torch.Tensor,
    blocks: Sequence[int],
    group: torch.Tensor,
    of_groups: torch.Tensor,
    divides: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast float8 data as :func:`reblock_by_scales` does, with the given amaxes of the new blocks.

    Args:
        group: the index of the new block of each row.
        of_groups: fp32 ``[groups, K]``.

    Returns:
        The data, and the scale of each value, for the blocks ``(1, 1, 0, 0)``.
    """
    values = scaled_by(qdata.to(torch.float32), scales, blocks)
    each = scales_of(of_groups, qdata.dtype).index_select(0, group)
    data = quantize_by_scales.portable(values, each, qdata.dtype, (1, 1, 0, 0), divides)
    return data, each
