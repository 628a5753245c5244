"""Operands of grad_weight, blocked again along tokens that are sharded over ranks.

This is the case of a replicated weight whose input is sharded by batch or sequence. A block of
tokens may then have rows on several ranks. With a sharded sequence, a rank's rows of a block need
not be adjacent.
"""

import math

import torch

from fp8_dist.granularity import Blocks
from fp8_dist.kernels import exponents_of_groups, reblock, reblock_groups, takes_transposed
from fp8_dist.mesh import (
    Layout,
    all_reduce_max,
    global_offset,
    groups_over,
    narrowed,
    sharded_dim,
)
from fp8_dist.tensor import Quantized

# Data, exponents, and blocks: (rows, columns) of a block, and where in its first block the matrix
# begins.
BlockMatrix = tuple[torch.Tensor, torch.Tensor, tuple[int, int, int, int]]


def reblocked(operand: Quantized, layout: Layout | None) -> BlockMatrix:
    """Convert an operand with block scales along its rows to a matrix with blocks of tokens.

    Args:
        operand: ``[..., K]``, local.
        layout: the layout of the operand that the GEMM takes; None if it is not distributed.

    Collectives: for each group of the axes that shard its tokens an all-reduce (MAX) of 1 byte per
    new block of the global operand.
    """
    matrix, exponents, blocks = as_block_matrix(operand)
    assert isinstance(operand.granularity, Blocks)
    size, rule = blocks[1], operand.granularity.rule and "ceil"
    axes = () if layout is None else _axes_of_tokens(layout)
    if layout is None or not axes:
        transposed = takes_transposed(matrix.device)
        data, exponents = reblock(matrix, exponents, blocks, size, rule, transposed)
        return data.t() if transposed else data, exponents, (size, 1, 0, 0)
    leading, here = layout.shape[:-1], operand.qdata.shape[:-1]
    tokens = torch.arange(math.prod(leading), device=matrix.device).view(leading)
    tokens = narrowed(tokens, global_offset(layout)[:-1], here).reshape(-1)
    group = tokens.div(size, rounding_mode="floor")
    count = -(-math.prod(leading) // size)
    found = exponents_of_groups(matrix, exponents, blocks, group, count, rule)
    found = all_reduce_max(found, groups_over(layout.mesh, axes))
    return *reblock_groups(matrix, exponents, blocks, group, found), (1, 1, 0, 0)


def as_block_matrix(operand: Quantized) -> BlockMatrix:
    """An operand ``[..., K]`` with block scales, as a matrix."""
    qdata, exponents, granularity = operand
    assert granularity.blocks is not None
    if qdata.ndim > 2:
        qdata = qdata.reshape(math.prod(qdata.shape[:-1]), qdata.shape[-1])
        exponents = exponents.reshape(len(qdata), exponents.shape[-1])
    return qdata, exponents, granularity.blocks


def _axes_of_tokens(layout: Layout) -> tuple[int, ...]:
    ndim = len(layout.shape)
    dims = [sharded_dim(p, ndim) for p in layout.placements]
    return tuple(
        axis
        for axis, dim in enumerate(dims)
        if dim is not None and dim != ndim - 1 and layout.mesh.size(axis) > 1
    )
