"""Grouped GEMMs of experts, on float8 operands; in a graph, each function is one operator.

Rows ``[R, ...]`` are tokens, sorted by expert. Expert e has the weight ``w[e]`` of ``[E, N, K]``,
and the rows of its group::

    output[m]      = w[e] x[m]                 for each row m of e       [R, N]
    grad_input[m]  = w[e]^T g[m]               for each row m of e       [R, K]
    grad_weight[e] = sum of g[m] x[m]^T        over the rows m of e      [E, N, K]

There is one float8 copy of each operand: x and g by rows, as they are sent between ranks, and w.
Scales that vary along a contracted dim are folded into g, as in
:mod:`fp8_dist.linear.rowwise_folded`: the scales of w's rows for grad_input (``rowwise_folded``),
and the scales of x's rows for grad_weight. The folded g is cast again: by rows for grad_input, by
columns of each expert's rows for grad_weight. With block scales, the operands of grad_weight are
instead cast again in blocks of one expert's tokens. All casts start from the float8 copy of g, so
results do not depend on which rank cast it. A graph does not know how many rows an expert has; its
operators read the sizes of the groups at run time.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8_dist.kernels import grouped
from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.kernels.folding import UNIT, fold_groups, unit_scales
from fp8_dist.kernels.gemm import GemmOptions
from fp8_dist.kernels.grouped import Groups
from fp8_dist.kernels.quantization import ALIGNMENT
from fp8_dist.mesh import Layout
from fp8_dist.operand.prepare import cast_once
from fp8_dist.scaling import Quantized
from fp8_dist.scaling.operators import dequantize, flat, multiply, operand_of


class GroupedGemm(NamedTuple):
    """The GEMM of the rows of each expert with its weight.

    Attributes:
        rows: ``[R, K]``; ``[R, N]`` without ``transpose``.
        weights: ``[E, N, K]``.
        transpose: whether to transpose the weights.
        emulate: compute in a wider type even on devices with a float8 GEMM.
    """

    rows: Quantized
    weights: Quantized
    transpose: bool
    groups: Groups
    out_dtype: torch.dtype
    emulate: bool


class GradientGemms(NamedTuple):
    """The GEMMs of a backward.

    Attributes:
        grad, input, weights: g ``[R, N]`` and x ``[R, K]``, by rows, and w ``[E, N, K]``.
        dtypes: those of grad_input and grad_weight; ``None`` for a gradient that is not needed.
        pads: ``pad_token_groups_for_grouped_mm`` of :class:`fp8_dist.moe.Float8ExpertsConfig`.
        emulate: as in :class:`GroupedGemm`.
    """

    grad: Quantized
    input: Quantized
    weights: Quantized
    groups: Groups
    dtypes: tuple[torch.dtype | None, torch.dtype | None]
    pads: bool
    emulate: bool


def add_bias(rows: Tensor, bias: Tensor, groups: Groups) -> Tensor:
    """Add to each row ``[R, N]`` the bias of its expert, from ``[E, N]``.

    The gradient of the bias is a sum over rows, in fp32.
    """
    return rows + bias.to(torch.float32)[groups.group_of_row].to(rows.dtype)


def grouped_mm(gemm: GroupedGemm) -> Tensor:
    """Multiply the rows of each expert by its weight.

    Returns:
        ``[R, N]``; ``[R, K]`` without ``transpose``.
    """
    if torch.compiler.is_compiling():
        rows, weights, transpose, groups, *options = gemm
        operands = *flat(rows), *flat(weights), *_flat(groups)
        return grouped_mm_operator.overload(*operands, transpose, *options)
    return _grouped_mm(gemm)


def _grouped_mm(gemm: GroupedGemm) -> Tensor:
    rows, weights, transpose, groups, out_dtype, emulate = gemm
    n, k = dims = weights.qdata.shape[1:]
    if not (rows.scheme.levels or any(size % ALIGNMENT for size in dims)) and len(rows.qdata):
        wide = weights.qdata.mT if transpose else weights.qdata
        return F.grouped_mm(rows.qdata, wide, offs=groups.ends).to(out_dtype)
    has_blocks = rows.scheme.is_recast_for_rows
    kernel = grouped.grouped_gemm(rows.qdata, dims, out_dtype, emulate, has_blocks)
    if kernel == "bf16":
        wide = _as_bf16(weights)
        return F.grouped_mm(_as_bf16(rows), wide.mT if transpose else wide, offs=groups.ends)
    if kernel == "float8":
        data = weights.qdata.mT if transpose else weights.qdata
        scale = weights.scales[0].mT if transpose else weights.scales[0]
        return grouped.grouped_scaled_mm(rows.qdata, data, rows.scales[0], scale, groups)
    product = rows.qdata.new_empty((len(rows.qdata), n if transpose else k), dtype=out_dtype)
    for group in groups.slices():
        left, right = _part_of_expert(rows, *group), _part_of_expert(weights, *group)
        result = multiply(left, right, (False, transpose), out_dtype, _options(emulate))
        product.narrow(0, *group[1:]).copy_(result)
    return product


def grouped_gradients(
    gemms: GradientGemms, layout: Layout | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of rows and of weights, the latter in the weights' memory layout.

    ``layout``: the layout of the gradient, if ranks have parts of each row.

    Collectives: with a layout and the recipe ``rowwise_folded``, an all-reduce of 4 bytes per row.
    """
    *operands, groups, dtypes, pads, emulate = gemms
    if layout is not None and dtypes[0] is not None and has_scales_to_fold(gemms.weights):
        left, right = _folded_parts(gemms.grad, gemms.weights, groups, layout)
        _, grad_weights = grouped_gradients(gemms._replace(dtypes=(None, dtypes[1])))
        return grouped_mm(GroupedGemm(left, right, False, groups, dtypes[0], emulate)), grad_weights
    if not torch.compiler.is_compiling():
        return _grouped_gradients(gemms)
    grad, input, weights = map(flat, operands)
    tensors = *grad, *input, *weights, *_flat(groups)
    found = iter(grouped_gradients_operator.overload(*tensors, *dtypes, pads, emulate))
    return None if dtypes[0] is None else next(found), None if dtypes[1] is None else next(found)


def _grouped_gradients(gemms: GradientGemms) -> tuple[Tensor | None, Tensor | None]:
    grad, _, weights, groups, (rows_dtype, weight_dtype), pads, emulate = gemms
    dims = weights.qdata.shape[1:]
    has_blocks = grad.scheme.is_recast_for_rows
    kernel = None
    source = None
    if weight_dtype is not None:
        kernel = grouped.grouped_gemm(grad.qdata, dims, weight_dtype, emulate, has_blocks)
    if kernel is not None and not has_blocks:
        is_aligned = not any(count % ALIGNMENT for count in groups.counts)
        if pads or is_aligned:
            source = groups.padded(ALIGNMENT).source
        else:
            kernel = None
    for_rows, for_weights = _gradient_operands(gemms, source)
    grad_rows = grad_weights = None
    if rows_dtype is not None:
        grad_rows = _grouped_mm(GroupedGemm(*for_rows, False, groups, rows_dtype, emulate))
    if weight_dtype is not None:
        is_transposed = is_stored_transposed(weights.qdata)
        left, right = for_weights[:: -1 if is_transposed else 1]
        if kernel is None:
            sums = _sums(left, right, groups, weight_dtype, emulate)
        elif has_blocks:
            sums = _sums_of_blocks(left, right, groups)
        else:
            scales = left.scales[0], right.scales[0]
            sums = grouped.grouped_scaled_sums(left.qdata, right.qdata, *scales, groups, kernel)
        grad_weights = sums.mT if is_transposed else sums
    return grad_rows, grad_weights


def has_scales_to_fold(weights: Quantized) -> bool:
    """Whether the scales of weights run along the contraction of grad_input."""
    return weights.scheme.for_row_contraction != weights.scheme


def is_stored_transposed(weights: Tensor) -> bool:
    """Whether weights ``[E, N, K]`` are a transposed view of a contiguous ``[E, K, N]``."""
    return weights.mT.is_contiguous() and not weights.is_contiguous()


def _sums(
    left: Quantized, right: Quantized, groups: Groups, out_dtype: torch.dtype, emulate: bool
) -> Tensor:
    """Multiply ``[N, R]`` by ``[R, K]`` for each expert's rows, one expert after the other."""
    shape = len(groups.counts), left.qdata.shape[1], right.qdata.shape[1]
    sums = grouped.without_empty(left.qdata.new_empty(shape, dtype=out_dtype), groups)
    for group in groups.slices():
        parts = [_part_of_expert(operand, *group) for operand in (left, right)]
        a, b = (part.scheme.for_rows(part, None) for part in parts)
        sums[group[0]] = multiply(a, b, (True, False), out_dtype, _options(emulate))
    return sums


def _sums_of_blocks(left: Quantized, right: Quantized, groups: Groups) -> Tensor:
    """Compute :func:`_sums` for operands with block scales, in one grouped GEMM.

    Groups are padded to whole blocks, so that no new block has rows of two experts.
    """
    (level,) = left.scheme.levels
    source, ends = groups.padded(level.columns or 1)

    def reblocked(operand: Quantized) -> Quantized:
        tensors = operand.qdata, operand.scales[0]
        data, scale = (grouped.rows_of_groups(tensor, source, False) for tensor in tensors)
        padded = operand._replace(qdata=data, scales=(scale,))
        return padded.scheme.for_rows(padded, None)

    a, b = reblocked(left), reblocked(right)
    return grouped.without_empty(F.grouped_mm(_as_bf16(a).t(), _as_bf16(b), offs=ends), groups)


def _as_bf16(operand: Quantized) -> Tensor:
    return operand.scheme.dequantize_to(operand, torch.bfloat16)


def _gradient_operands(
    gemms: GradientGemms, source: Tensor | None
) -> tuple[tuple[Quantized, Quantized], tuple[Quantized, Quantized]]:
    """Return the operands of both gradient GEMMs, with scales folded where they must be.

    ``source``: transpose the operands of grad_weight, as
    :func:`fp8_dist.kernels.grouped.rows_of_groups`.
    """
    grad, input, weights, groups, (rows_dtype, weight_dtype), *_ = gemms
    for_rows, for_weights = (grad, weights), (grad, input)
    scheme = grad.scheme
    s = weights.scales[0].flatten(1) if rows_dtype and has_scales_to_fold(weights) else None
    t = input.scales[0].view(-1) if weight_dtype and not scheme.is_recast_for_rows else None
    if s is None and t is None:
        return for_rows, for_weights
    experts, features = len(groups.counts), (input if s is None else weights).qdata.shape[-1]
    ones = grad.scales[0].new_ones(experts, 1, features)
    gradient, expert_of_row = (grad.qdata, grad.scales[0]), groups.group_of_row
    folded = iter(fold_groups(*gradient, s, t, expert_of_row, experts, source))
    if s is not None:
        left = Quantized(next(folded), (next(folded),), scheme)
        for_rows = left, _after_folding(weights, ones)
    if t is not None:
        left = Quantized(next(folded), (next(folded).unsqueeze(1),), scheme.for_row_contraction)
        if source is not None:
            input = input._replace(qdata=grouped.rows_of_groups(input.qdata, source, True))
        for_weights = left, _after_folding(input, ones)
    return for_rows, for_weights


def _after_folding(operand: Quantized, ones: Tensor) -> Quantized:
    """Return an operand whose scales were folded into the gradient, and are 1 now."""
    return operand._replace(scales=(ones,), scheme=operand.scheme.for_row_contraction)


def _folded_parts(
    grad: Quantized, weights: Quantized, groups: Groups, layout: Layout
) -> tuple[Quantized, Quantized]:
    """Return the operands of grad_input if this rank has a part of each row of the gradient."""
    fold = (weights.scales[0].flatten(1) * UNIT).index_select(0, groups.group_of_row)
    folded = cast_once(layout.wrap(dequantize(grad) * fold), grad.scheme)
    left = folded._replace(scales=(folded.scales[0] / UNIT,))
    return left, _after_folding(weights, unit_scales(weights.qdata))


def _part_of_expert(operand: Quantized, expert: int, begin: int, count: int) -> Quantized:
    """Return an expert's part of rows ``[R, K]``, or of weights ``[E, N, K]``.

    Scales with three dims have one entry per expert.
    """
    data, scales = operand.qdata, operand.scales
    if data.ndim == 2:
        data = data.narrow(0, begin, count)
        scales = operand.scheme.part_of_scales(scales, operand.start, 0, begin, count, 2)
    else:
        data = data[expert]
    scales = tuple([scale[expert] if scale.ndim > 2 else scale for scale in scales])
    return operand._replace(qdata=data, scales=scales)


def _options(emulate: bool) -> GemmOptions:
    # Some experts have few rows, so the sizes are padded where a device requires that.
    return False, True, emulate, False


# The arguments of an operator for the groups.
_GROUPS = "Tensor on_host, Tensor sizes, Tensor group_of_row, Tensor ends"


def _flat(groups: Groups) -> tuple[Tensor, ...]:
    return groups.on_host, groups.sizes, groups.group_of_row, groups.ends


def _empty_product(*arguments: Any) -> Tensor:
    rows, weights, transpose, out_dtype = arguments[0], arguments[4], *arguments[12:14]
    return rows.new_empty((rows.shape[0], weights.shape[1 if transpose else 2]), dtype=out_dtype)


@custom_op(
    "grouped_mm(Tensor a, Tensor[] scales_a, str scheme_a, int[] start_a, Tensor b, "
    f"Tensor[] scales_b, str scheme_b, int[] start_b, {_GROUPS}, bool transpose, "
    "ScalarType out_dtype, bool emulate) -> Tensor",
    fake=_empty_product,
)
def grouped_mm_operator(*arguments: Any) -> Tensor:
    """Operator of :func:`grouped_mm`."""
    rows, weights = operand_of(*arguments[:4]), operand_of(*arguments[4:8])
    transpose, *options = arguments[12:]
    return _grouped_mm(GroupedGemm(rows, weights, transpose, Groups(*arguments[8:12]), *options))


def _empty_gradients(*arguments: Any) -> list[Tensor]:
    gradients = zip((arguments[4], arguments[8]), arguments[16:18], strict=True)
    return [torch.empty_like(like, dtype=dtype) for like, dtype in gradients if dtype is not None]


@custom_op(
    "grouped_gradients(Tensor g, Tensor[] scales_g, str scheme_g, int[] start_g, Tensor x, "
    "Tensor[] scales_x, str scheme_x, int[] start_x, Tensor w, Tensor[] scales_w, str scheme_w, "
    f"int[] start_w, {_GROUPS}, ScalarType? rows_dtype, ScalarType? weight_dtype, bool pads, "
    "bool emulate) -> Tensor[]",
    fake=_empty_gradients,
)
def grouped_gradients_operator(*arguments: Any) -> list[Tensor]:
    """Operator of :func:`grouped_gradients`. Returns the gradients that are needed."""
    grad, input, weights = (operand_of(*arguments[begin : begin + 4]) for begin in (0, 4, 8))
    groups, dtypes = Groups(*arguments[12:16]), arguments[16:18]
    gemms = GradientGemms(grad, input, weights, groups, dtypes, *arguments[18:])
    return [gradient for gradient in _grouped_gradients(gemms) if gradient is not None]
