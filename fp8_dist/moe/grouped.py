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

import torch
from torch import Tensor

from fp8_dist.kernels import Groups as Groups
from fp8_dist.kernels import fold_groups, unit_scales
from fp8_dist.moe.config import Float8ExpertsConfig
from fp8_dist.recipe import Gemm
from fp8_dist.scaling import Quantized, multiply


def add_bias(rows: Tensor, bias: Tensor, groups: Groups) -> Tensor:
    """Add the bias of its expert, of ``[E, N]``, to each row ``[R, N]``.

    The gradient of the bias is a sum over rows, in fp32.
    """
    return rows + bias.to(torch.float32)[groups.of_row].to(rows.dtype)


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
    product = rows.qdata.new_empty((len(rows.qdata), columns), dtype=out_dtype)
    for group in groups.slices():
        own = _own(rows, *group), _own(weights, *group)
        part = product.narrow(0, *group[1:])
        part.copy_(multiply(*own, (False, turn), out_dtype, _options(config)))
    return product


def grouped_sums(
    grad: Quantized,
    input: Quantized,
    groups: Groups,
    out_dtype: torch.dtype,
    config: Float8ExpertsConfig,
) -> Tensor:
    """Sum ``grad[r] input[r]^T`` over the rows of each expert: ``[E, N, K]``."""
    shape = len(groups.counts), grad.qdata.shape[1], input.qdata.shape[1]
    sums = grad.qdata.new_empty(shape, dtype=out_dtype)
    for expert, count in enumerate(groups.counts):
        if not count:
            sums[expert].zero_()
    for group in groups.slices():
        own = [_own(each, *group) for each in (grad, input)]
        left, right = (each.scheme.for_rows(each, None) for each in own)
        sums[group[0]] = multiply(left, right, (True, False), out_dtype, _options(config))
    return sums


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
    operands = _gradient_operands(grad, input, weights, groups, needs, config)
    of_rows = of_weights = None
    if needs[0]:
        of_rows = grouped_mm(*operands["grad_input"], False, groups, dtypes[0], config)
    if needs[1]:
        of_weights = grouped_sums(*operands["grad_weight"], groups, dtypes[1], config)
    return of_rows, of_weights


def _gradient_operands(
    grad: Quantized,
    input: Quantized,
    weights: Quantized,
    groups: Groups,
    needs: tuple[bool, bool],
    config: Float8ExpertsConfig,
) -> dict[Gemm, tuple[Quantized, Quantized]]:
    """The operands of both gradient GEMMs, with scales that these can apply."""
    operands: dict[Gemm, tuple[Quantized, Quantized]] = {
        "grad_input": (grad, weights),
        "grad_weight": (grad, input),
    }
    scheme = grad.scheme
    s = weights.scales[0].flatten(1) if config.folds and needs[0] else None
    t = input.scales[0].view(-1) if needs[1] and not scheme.is_recast_for_rows else None
    if s is None and t is None:
        return operands
    experts = len(groups.counts)
    made = iter(fold_groups(grad.qdata, grad.scales[0], s, t, groups.of_row, experts))
    # The scales of the other operand are 1, because they were folded in.
    ones = (unit_scales(input.qdata),)
    if s is not None:
        left = Quantized(next(made), (next(made),), scheme)
        right = weights._replace(scales=ones, scheme=weights.scheme.second)
        operands["grad_input"] = left, right
    if t is not None:
        left = Quantized(next(made), (next(made).unsqueeze(1),), scheme.second)
        right = input._replace(scales=ones, scheme=scheme.second)
        operands["grad_weight"] = left, right
    return operands


def _own(operand: Quantized, expert: int, begin: int, count: int) -> Quantized:
    """An expert's part of rows ``[R, K]``, or of weights ``[E, N, K]``.

    Scales of three dims are those of experts.
    """
    data, scales = operand.qdata, operand.scales
    if data.ndim == 2:
        data = data.narrow(0, begin, count)
        scales = operand.scheme.part_of_scales(scales, operand.start, 0, begin, count, 2)
    else:
        data = data[expert]
    own = tuple([scale[expert] if scale.ndim > 2 else scale for scale in scales])
    return operand._replace(qdata=data, scales=own)


def _options(config: Float8ExpertsConfig) -> tuple[bool, bool, bool]:
    # Some experts have few rows, so the sizes are padded where a device requires that.
    return False, True, config.emulate
