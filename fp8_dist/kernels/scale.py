"""The amax, and the formula that computes a scale from it.

With ``fp8_max`` the largest finite value of the target dtype::

    m     = float32(float64(fp8_max) / max(float64(amax), 1e-12))
    m     = exp2(floor(log2(m)))                  # round_scales_to_power_of_2
    qdata = saturate(float32(x) * m)
    scale = 1 / m                                 # fp32, dequantization: x ~= qdata * scale

A non-finite amax gives ``m`` of 0 or NaN and a scale of inf or NaN. Every value that the scale
covers then dequantizes to NaN (``0 * inf``), so a NaN on one rank becomes visible on all ranks.

The epsilon and the rounding are torchao's, so that its scales are reproduced bit for bit.
"""

import math
from collections.abc import Sequence

import torch

from fp8_dist.kernels.custom_op import custom_op

EPS = 1e-12

# The quantization multiplier and the scale, fp32, of the same shape.
Scaling = tuple[torch.Tensor, torch.Tensor]


@custom_op("amax(Tensor x, int[]? dims=None) -> Tensor")
def amax(x: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    """Maximum of the absolute values of a local tensor, fp32; NaN if it contains a NaN.

    Args:
        x: any shape, floating point. The amax of no elements is 0.
        dims: dims to reduce, which keep size 1. ``None`` reduces all dims to a 0-dim tensor.
    """
    if x.numel() == 0:
        return torch.zeros(_amax_shape(x, dims), dtype=torch.float32, device=x.device)
    if dims is None:
        low, high = torch.aminmax(x)
        # maximum, unlike Python's max, keeps a NaN.
        largest = torch.maximum(low.neg(), high)
    else:
        largest = torch.amax(x.abs(), tuple(dims), keepdim=True) if dims else x
    # abs clears the sign of a NaN and of -0.0, so that the bits of an amax, read as an integer,
    # are ordered like its values (fp8_dist.mesh.amax).
    return largest.to(torch.float32).abs()


@amax.register_fake
def amax_fake(x: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    return x.new_empty(_amax_shape(x, dims), dtype=torch.float32)


def _amax_shape(x: torch.Tensor, dims: Sequence[int] | None) -> list[int]:
    return [] if dims is None else [1 if d in dims else n for d, n in enumerate(x.shape)]


@custom_op("amax_of_each(Tensor first, Tensor[] others, bool of_rows=False) -> Tensor")
def amax_of_each(
    first: torch.Tensor, others: Sequence[torch.Tensor], of_rows: bool = False
) -> torch.Tensor:
    """:func:`amax` of each of many local tensors on one device: fp32, ``[1 + len(others)]``.

    Args:
        of_rows: compute the amax of each row (along the last dim) instead. The rows of each tensor
            follow those of the previous one.
    """
    tensors = (first, *others)
    if not of_rows:
        return torch.stack([amax(x) for x in tensors])
    return torch.cat([amax(x, (x.ndim - 1,)).reshape(-1) for x in tensors])


@amax_of_each.register_fake
def _amax_of_each_fake(
    first: torch.Tensor, others: Sequence[torch.Tensor], of_rows: bool = False
) -> torch.Tensor:
    sizes = [math.prod(x.shape[:-1]) if of_rows else 1 for x in (first, *others)]
    return first.new_empty(sum(sizes), dtype=torch.float32)


@custom_op(
    "scaling_from_amax(Tensor amax, ScalarType dtype, bool round_scales_to_power_of_2=False) "
    "-> (Tensor, Tensor)"
)
def scaling_from_amax(
    amax: torch.Tensor, dtype: torch.dtype, round_scales_to_power_of_2: bool = False
) -> Scaling:
    """Quantization multiplier ``m`` and dequantization scale, by the formula of this module.

    ``amax`` is fp32, of any shape, with one element per scale. Both results have its shape and
    dtype.
    """
    m = (torch.finfo(dtype).max / amax.to(torch.float64).clamp(min=EPS)).to(torch.float32)
    if round_scales_to_power_of_2:
        m = torch.exp2(torch.floor(torch.log2(m)))
    return m, torch.reciprocal(m)


scaling_from_amax.register_fake(lambda amax, *_: (torch.empty_like(amax), torch.empty_like(amax)))
