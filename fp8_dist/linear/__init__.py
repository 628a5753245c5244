"""``Float8Linear``: the module, its autograd function, its operands, its weight.

This package imports casts, Float8Tensor, meshes, kernels and configs.
"""

from fp8_dist.linear.module import Float8Linear, float8_layers, invalidate_float8_scales

__all__ = ["Float8Linear", "float8_layers", "invalidate_float8_scales"]
