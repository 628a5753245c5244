"""``Float8Tensor``, a tensor subclass of float8 data with its scales, and its operators."""

from fp8_dist.tensor import ops as ops  # registers the operators
from fp8_dist.tensor.float8_tensor import Float8Tensor, quantized_as, scales_of

__all__ = ["Float8Tensor", "quantized_as", "scales_of"]
