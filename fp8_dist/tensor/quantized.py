"""Local float8 data with its scales: what the GEMMs of a layer multiply."""

from typing import NamedTuple

import torch

from fp8_dist.granularity import TENSOR, Granularity


class Quantized(NamedTuple):
    """A local tensor in float8. (Where no tensor is needed it costs less than a Float8Tensor.)"""

    qdata: torch.Tensor  # the float8 bytes, any shape
    scale: torch.Tensor  # fp32, of the shape that the granularity gives it
    granularity: Granularity = TENSOR
