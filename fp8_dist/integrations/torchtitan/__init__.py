"""Integration with torchtitan 0.3: its models in float8, with float8 communication.

It needs the package ``torchtitan``.
"""

from fp8_dist.integrations.torchtitan.experts import Float8ExpertsConverter
from fp8_dist.integrations.torchtitan.parallelize import Float8Converter, with_float8

__all__ = ["Float8Converter", "Float8ExpertsConverter", "with_float8"]
