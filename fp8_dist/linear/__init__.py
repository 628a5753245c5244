"""``Float8Linear``: the module, its autograd function, its operands, its weight.

Below this room: casts, Float8Tensor, meshes, kernels, configs.
"""

from fp8_dist.linear.module import Float8Linear, float8_layers, invalidate_float8_scales

__all__ = ["Float8Linear", "float8_layers", "invalidate_float8_scales"]
