"""Scaling schemes: what a scale covers, and how data is cast, moved and multiplied with scales."""

from fp8_dist.scaling.blocks import (
    Blocks as Blocks,
    BlockScheme as BlockScheme,
    Fp32Blocks as Fp32Blocks,
    Mxfp4 as Mxfp4,
    transposed as transposed,
)
from fp8_dist.scaling.dense import Dense as Dense, Unscaled as Unscaled, covering as covering
from fp8_dist.scaling.level import Level as Level, Start as Start
from fp8_dist.scaling.scheme import (
    CastPlan as CastPlan,
    Quantized as Quantized,
    Scales as Scales,
    Scheme as Scheme,
    Statistics as Statistics,
    common_start as common_start,
    scheme_named as scheme_named,
    shared_schemes as shared_schemes,
)
