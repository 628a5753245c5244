"""``Float8Tensor``, a tensor subclass of float8 data with its scales, and its operators."""

# Importing ops registers the operators.
from fp8_dist.tensor.float8_tensor import Float8Tensor, quantized_as, scales_of
from fp8_dist.tensor.ops import scaled_mm

__all__ = ["Float8Tensor", "quantized_as", "scaled_mm", "scales_of"]
