"""Local float8 data with its scales: the operands of a layer's GEMMs."""

from typing import NamedTuple

import torch

from fp8_dist.granularity import TENSOR, Granularity
from fp8_dist.tensor.float8_tensor import Float8Tensor, granularity_of


class Quantized(NamedTuple):
    """A local tensor in float8, which costs less than a Float8Tensor.

    Attributes:
        qdata: the float8 bytes, any shape.
        scale: fp32, or the exponents of blocks, in the shape that the granularity gives it.
        granularity: the values that one scale covers.
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    granularity: Granularity = TENSOR

    def as_tensor(self, orig_dtype: torch.dtype) -> Float8Tensor:
        """Return this cast of a tensor of ``orig_dtype`` as a Float8Tensor."""
        rows = self.granularity.to_rows(self.scale)
        return Float8Tensor(self.qdata, rows, orig_dtype, self.granularity.name)

    @staticmethod
    def of(tensor: Float8Tensor) -> "Quantized":
        """Return the data and scales of a Float8Tensor."""
        granularity = granularity_of(tensor)
        return Quantized(tensor.qdata, granularity.from_rows(tensor.scale), granularity)
