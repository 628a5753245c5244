"""``Float8Tensor``: float8 bytes with their scale as a tensor, and the operators on it."""

# Importing ops registers the operators.
from fp8_dist.tensor.float8_tensor import Float8Tensor, quantized_as, scales_of
from fp8_dist.tensor.ops import scaled_mm

__all__ = ["Float8Tensor", "quantized_as", "scaled_mm", "scales_of"]
