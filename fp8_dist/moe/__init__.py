"""Mixture-of-experts layers in float8: grouped GEMMs, and tokens that travel as float8.

Convert a model's experts with :func:`convert_experts_to_float8_training`. Your own experts can call
:func:`grouped_linear`, or, if they are on several ranks, :func:`route`, :func:`dispatch_linear` and
:func:`linear_combine`.
"""

from fp8_dist.moe.config import Float8ExpertsConfig
from fp8_dist.moe.dispatch import Routing, route
from fp8_dist.moe.experts import convert_experts_to_float8_training, float8_experts
from fp8_dist.moe.layers import dispatch_linear, grouped_linear, linear_combine

__all__ = [
    "Float8ExpertsConfig",
    "Routing",
    "convert_experts_to_float8_training",
    "dispatch_linear",
    "float8_experts",
    "grouped_linear",
    "linear_combine",
    "route",
]
