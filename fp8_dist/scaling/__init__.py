"""Scaling schemes: what a scale covers, and how data is cast, moved and multiplied with scales."""

from fp8_dist.kernels import GemmOptions
from fp8_dist.scaling.blocks import Blocks, BlockScheme, Fp32Blocks, as_matrix, turned
from fp8_dist.scaling.dense import Dense, covering
from fp8_dist.scaling.level import Level, Start
from fp8_dist.scaling.operators import (
    by_scheme,
    cast,
    dequantize,
    empty_scales,
    empty_statistics,
    flat,
    matrices,
    measure,
    multiply,
    operand_of,
    unshared,
)
from fp8_dist.scaling.reduction import (
    Placed,
    message_dtype,
    reduced_statistics,
    reduction_groups,
    whole_statistics,
    whole_statistics_of_each,
)
from fp8_dist.scaling.scheme import (
    CastPlan,
    Quantized,
    Scales,
    Scheme,
    Statistics,
    common_start,
    scheme_named,
)

__all__ = [
    "BlockScheme",
    "Blocks",
    "CastPlan",
    "Dense",
    "Fp32Blocks",
    "GemmOptions",
    "Level",
    "Placed",
    "Quantized",
    "Scales",
    "Scheme",
    "Start",
    "Statistics",
    "as_matrix",
    "by_scheme",
    "cast",
    "common_start",
    "covering",
    "dequantize",
    "empty_scales",
    "empty_statistics",
    "flat",
    "matrices",
    "measure",
    "message_dtype",
    "multiply",
    "operand_of",
    "reduced_statistics",
    "reduction_groups",
    "scheme_named",
    "turned",
    "unshared",
    "whole_statistics",
    "whole_statistics_of_each",
]
