"""Local float8 data with its scales: what the GEMMs of a layer multiply."""

from typing import NamedTuple

import torch

from fp8_dist.granularity import TENSOR, Granularity
from fp8_dist.tensor.float8_tensor import Float8Tensor, granularity_of


class Quantized(NamedTuple):
    """A local tensor in float8. (Where no tensor is needed it costs less than a Float8Tensor.)

    Attributes:
        qdata: the float8 bytes, any shape.
        scale: fp32, or the exponents of blocks, in the shape that the granularity gives it.
        granularity: the values that one scale covers.
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    granularity: Granularity = TENSOR

    def as_tensor(self, orig_dtype: torch.dtype) -> Float8Tensor:
        """The tensor of ``orig_dtype`` that this is a cast of."""
        rows = self.granularity.to_rows(self.scale)
        return Float8Tensor(self.qdata, rows, orig_dtype, self.granularity.name)

    @staticmethod
    def of(tensor: Float8Tensor) -> "Quantized":
        """The data and scales of a Float8Tensor."""
        granularity = granularity_of(tensor)
        return Quantized(tensor.qdata, granularity.from_rows(tensor.scale), granularity)
