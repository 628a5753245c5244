"""The grouped GEMMs of experts as operators for graphs.

A graph does not know how many rows an expert has. So each function of
:mod:`fp8_dist.moe.grouped` is one operator there, which reads the sizes of the groups.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fp8_dist.kernels import custom_op
from fp8_dist.mesh import Layout
from fp8_dist.moe import grouped
from fp8_dist.moe.config import Float8ExpertsConfig
from fp8_dist.moe.grouped import Groups, Operands
from fp8_dist.scaling import Quantized, flat, operand_of


def grouped_mm(
    rows: Quantized,
    weights: Quantized,
    turn: bool,
    groups: Groups,
    out_dtype: torch.dtype,
    config: Float8ExpertsConfig,
) -> Tensor:
    """:func:`fp8_dist.moe.grouped.grouped_mm`; in a graph, one operator."""
    if not torch.compiler.is_compiling():
        return grouped.grouped_mm(rows, weights, turn, groups, out_dtype, config)
    operands = *flat(rows), *flat(weights), *_flat_groups(groups)
    return grouped_mm_operator.overload(*operands, turn, out_dtype, *_flat_config(config))


def grouped_gradients(
    of: Operands,
    groups: Groups,
    needs: tuple[bool, bool],
    dtypes: tuple[torch.dtype, torch.dtype],
    config: Float8ExpertsConfig,
    layout: Layout | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """:func:`fp8_dist.moe.grouped.grouped_gradients`; in a graph, one operator.

    ``layout``: the layout of the gradient, if ranks have parts of each row.

    Collectives: with a layout and the recipe ``rowwise_folded``, an all-reduce of 4 bytes per row.
    """
    if layout is not None and config.folds and needs[0]:
        left, right = grouped.folded_parts(of.grad, of.weights, groups, layout)
        of_rows = grouped_mm(left, right, False, groups, dtypes[0], config)
        return of_rows, grouped_gradients(of, groups, (False, needs[1]), dtypes, config)[1]
    if not torch.compiler.is_compiling():
        return grouped.grouped_gradients(of, groups, needs, dtypes, config)
    operands = *[each for operand in of for each in flat(operand)], *_flat_groups(groups)
    overload, rest = grouped_gradients_operator.overload, _flat_config(config)
    made = iter(overload(*operands, needs, *dtypes, *rest))
    return next(made) if needs[0] else None, next(made) if needs[1] else None


_GROUPS = "Tensor on_host, Tensor sizes, Tensor of_row, Tensor ends"
_CONFIG = "str recipe, bool pads, bool emulate"


def _flat_groups(groups: Groups) -> tuple[Tensor, ...]:
    return groups.on_host, groups.sizes, groups.of_row, groups.ends


def _flat_config(config: Float8ExpertsConfig) -> tuple[str, bool, bool]:
    return config.recipe, config.pad_token_groups_for_grouped_mm, config.emulate


@lru_cache
def _config(recipe: Any, pads: bool, emulate: bool) -> Float8ExpertsConfig:
    return Float8ExpertsConfig(recipe, pad_token_groups_for_grouped_mm=pads, emulate=emulate)


def _empty_product(*arguments: Any) -> Tensor:
    rows, weights, turn, out_dtype = arguments[0], arguments[4], *arguments[12:14]
    return rows.new_empty((rows.shape[0], weights.shape[1 if turn else 2]), dtype=out_dtype)


@custom_op(
    "grouped_mm(Tensor a, Tensor[] scales_a, str scheme_a, int[] start_a, Tensor b, "
    f"Tensor[] scales_b, str scheme_b, int[] start_b, {_GROUPS}, bool turn, "
    f"ScalarType out_dtype, {_CONFIG}) -> Tensor",
    fake=_empty_product,
)
def grouped_mm_operator(*arguments: Any) -> Tensor:
    """Operator of :func:`grouped_mm`."""
    rows, weights = operand_of(*arguments[:4]), operand_of(*arguments[4:8])
    turn, out_dtype, *of_config = arguments[12:]
    groups, config = Groups(*arguments[8:12]), _config(*of_config)
    return grouped.grouped_mm(rows, weights, turn, groups, out_dtype, config)


def _empty_gradients(*arguments: Any) -> list[Tensor]:
    likes, (needs, *dtypes) = (arguments[4], arguments[8]), arguments[16:19]
    each = zip(likes, needs, dtypes, strict=True)
    return [torch.empty_like(like, dtype=dtype) for like, need, dtype in each if need]


@custom_op(
    "grouped_gradients(Tensor g, Tensor[] scales_g, str scheme_g, int[] start_g, Tensor x, "
    "Tensor[] scales_x, str scheme_x, int[] start_x, Tensor w, Tensor[] scales_w, str scheme_w, "
    f"int[] start_w, {_GROUPS}, bool[] needs, ScalarType rows_dtype, ScalarType weight_dtype, "
    f"{_CONFIG}) -> Tensor[]",
    fake=_empty_gradients,
)
def grouped_gradients_operator(*arguments: Any) -> list[Tensor]:
    """Operator of :func:`grouped_gradients`. Returns the gradients that are needed."""
    of = Operands(*[operand_of(*arguments[begin : begin + 4]) for begin in (0, 4, 8)])
    needs, of_rows, of_weight, *of_config = arguments[16:]
    groups, config = Groups(*arguments[12:16]), _config(*of_config)
    made = grouped.grouped_gradients(of, groups, needs, (of_rows, of_weight), config)
    return [gradient for gradient in made if gradient is not None]
