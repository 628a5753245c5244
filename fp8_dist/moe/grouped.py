"""Grouped GEMMs of experts, on float8 operands.

Rows ``[R, ...]`` are tokens, sorted by expert. Expert e has the weight ``w[e]`` of ``[E, N, K]``,
and the rows of its group::

    output[m]      = w[e] x[m]                 for each row m of e       [R, N]
    grad_input[m]  = w[e]^T g[m]               for each row m of e       [R, K]
    grad_weight[e] = sum of g[m] x[m]^T        over the rows m of e      [E, N, K]

There is one float8 copy of each operand: x and g by rows, as they are sent between ranks, and w.
Scales that run along a contraction are folded into g, as in :mod:`fp8_dist.linear.rowwise_folded`:
for grad_input those of the rows of w (recipe ``rowwise_folded``), and for grad_weight those of the
rows of x. The folded g is cast again: by rows, or with one scale per column of an expert's rows.
Rows in blocks are cast again in blocks of tokens of one expert instead. Everything follows from the
float8 copy of g, so the result does not depend on the rank that cast it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8_dist.linear.rowwise_folded import locally_folded
from fp8_dist.moe.config import Float8ExpertsConfig
from fp8_dist.recipe import Gemm
from fp8_dist.scaling import Quantized, multiply


class Groups(NamedTuple):
    """The rows of each expert, among rows that are sorted by expert.

    Attributes:
        counts: the number of rows of each expert, on the host.
        of_row: the expert of each row, int64 ``[R]``.
    """

    counts: list[int]
    of_row: Tensor

    @staticmethod
    def of(sizes: Tensor, counts: list[int]) -> "Groups":
        """The groups of given sizes, as a tensor and on the host."""
        experts = torch.arange(len(sizes), device=sizes.device)
        of_row = torch.repeat_interleave(experts, sizes, output_size=sum(counts))
        return Groups(counts, of_row)


def grouped_mm(
    rows: Quantized,
    weights: Quantized,
    turn: bool,
    groups: Groups,
    out_dtype: torch.dtype,
    config: Float8ExpertsConfig,
) -> Tensor:
    """Multiply the rows of each expert by its weight.

    Args:
        rows: ``[R, K]``; ``[R, N]`` without ``turn``.
        weights: ``[E, N, K]``.
        turn: whether to transpose the weights.

    Returns:
        ``[R, N]``; ``[R, K]`` without ``turn``.
    """
    columns = weights.qdata.shape[1 if turn else 2]
    products, begin = [rows.qdata.new_empty((0, columns), dtype=out_dtype)], 0
    for expert, count in enumerate(groups.counts):
        if count:
            left, right = rows_of(rows, begin, count), matrix_of(weights, expert)
            products.append(multiply(left, right, (False, turn), out_dtype, _options(config)))
        begin += count
    return torch.cat(products)


def grouped_gradients(
    grad: Quantized,
    input: Quantized,
    weights: Quantized,
    groups: Groups,
    needs: tuple[bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype],
    config: Float8ExpertsConfig,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of rows and of weights.

    Args:
        grad, input: ``[R, N]`` and ``[R, K]``, by rows.
        needs, dtypes: for grad_input and grad_weight, whether it is needed, and its dtype.
    """
    of_rows: list[Tensor] = []
    of_weights: list[Tensor] = []
    begin = 0
    for expert, count in enumerate(groups.counts):
        g, x = (rows_of(each, begin, count) for each in (grad, input))
        w, begin = matrix_of(weights, expert), begin + count
        operands = _gradient_operands(g, x, w, needs, config) if count else {}
        if needs[0] and count:
            left, right = operands["grad_input"]
            product = multiply(left, right, (False, False), dtypes[0], _options(config))
            of_rows.append(product)
        if needs[1] and count:
            left, right = operands["grad_weight"]
            product = multiply(left, right, (True, False), dtypes[1], _options(config))
            of_weights.append(product)
        elif needs[1]:
            of_weights.append(w.qdata.new_zeros(w.qdata.shape, dtype=dtypes[1]))
    none = input.qdata.new_empty((0, input.qdata.shape[1]), dtype=dtypes[0])
    grad_input = (torch.cat(of_rows) if of_rows else none) if needs[0] else None
    return grad_input, torch.stack(of_weights) if needs[1] else None


def _gradient_operands(
    grad: Quantized,
    input: Quantized,
    weight: Quantized,
    needs: tuple[bool, bool],
    config: Float8ExpertsConfig,
) -> dict[Gemm, tuple[Quantized, Quantized]]:
    """The operands of both gradient GEMMs of one expert."""
    found: dict[Gemm, tuple[Quantized, Quantized]] = {"grad_input": (grad, weight)}
    scheme = grad.scheme
    if scheme.is_recast_for_rows:
        if needs[1]:
            found["grad_weight"] = scheme.for_rows(grad, None), scheme.for_rows(input, None)
        return found
    right: dict[Gemm, Quantized] = {"grad_input": weight} if config.folds and needs[0] else {}
    if needs[1]:
        right["grad_weight"] = input
    if not right:
        return found
    values = scheme.dequantize(grad.qdata, grad.scales)
    return found | locally_folded(values, scheme, right, False)


def rows_of(rows: Quantized, begin: int, count: int) -> Quantized:
    """Some consecutive rows of ``[R, K]``."""
    scales = rows.scheme.part_of_scales(rows.scales, rows.start, 0, begin, count, 2)
    return rows._replace(qdata=rows.qdata.narrow(0, begin, count), scales=scales)


def matrix_of(weights: Quantized, expert: int) -> Quantized:
    """The weight of one expert, of ``[E, N, K]``."""
    scales = tuple([scale[expert] if scale.ndim > 2 else scale for scale in weights.scales])
    return weights._replace(qdata=weights.qdata[expert], scales=scales)


def _options(config: Float8ExpertsConfig) -> tuple[bool, bool, bool]:
    # Some experts have few rows, so the sizes are padded where a device requires that.
    return False, True, config.emulate
