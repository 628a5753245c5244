"""Input dtypes and result types of the GPU kernels, with Triton or without."""

from typing import NamedTuple

import torch

# Input dtypes of the kernels. Other dtypes are left to the portable implementations.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Layouts(NamedTuple):
    """Float8 data of a matrix ``[M, K]``, in the requested layouts.

    Attributes:
        qdata: ``[M, K]``, contiguous.
        qdata_t: the transpose of the same bytes, ``[K, M]``, contiguous.
    """

    qdata: torch.Tensor | None
    qdata_t: torch.Tensor | None


class Cast(NamedTuple):
    """:class:`Layouts`, with the multiplier and the scale: fp32, of the shape of the amax."""

    qdata: torch.Tensor | None
    qdata_t: torch.Tensor | None
    multiplier: torch.Tensor
    scale: torch.Tensor


class BlockCast(NamedTuple):
    """:class:`Layouts`, with the exponents of blocks: uint8."""

    qdata: torch.Tensor | None
    qdata_t: torch.Tensor | None
    exponents: torch.Tensor


class RecordedCast(NamedTuple):
    """:class:`Layouts`, with the amax of the matrix and values derived from it (fp32, 0-dim).

    Attributes:
        scale: NaN if the amax is not finite.
        largest: the larger of the recorded amax and this one.
    """

    qdata: torch.Tensor | None
    qdata_t: torch.Tensor | None
    amax: torch.Tensor
    scale: torch.Tensor
    largest: torch.Tensor


class FoldedRows(NamedTuple):
    """The first fold of a gradient ``[M, N]`` (:mod:`fp8_dist.linear.rowwise_folded`).

    Attributes:
        multiplier: multiplier of g0, ``[M, 1]``; the scale is its reciprocal.
        qdata: g1 ``[M, N]``, contiguous; ``None`` without the weight's scales.
        scale: r1 ``[M, 1]``, the scale of g1; ``None`` without the weight's scales.
        column_amax: amax of the columns of ``g0 * t``, ``[1, N]``; ``None`` without the input's
            scales.
    """

    multiplier: torch.Tensor
    qdata: torch.Tensor | None
    scale: torch.Tensor | None
    column_amax: torch.Tensor | None
