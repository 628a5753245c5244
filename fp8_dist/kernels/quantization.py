"""Casts of local tensors to float8, by the formula of :mod:`fp8_dist.kernels.scale`."""

from typing import Any

import torch

from fp8_dist.kernels.custom_op import custom_op


@custom_op("quantize(Tensor x, Tensor multiplier, ScalarType dtype, *, bool fits=False) -> Tensor")
def quantize(
    x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, *, fits: bool = False
) -> torch.Tensor:
    """``saturate(float32(x) * m)`` as ``dtype``.

    Args:
        x: any shape, floating point, local.
        multiplier: fp32, 0-dim or of size 1 along the dims that it covers.
        dtype: a float8 dtype.
        fits: the multiplier is that of an amax which no value of ``x`` exceeds. There is nothing to
            saturate then (a rounded product ends less than half a step above the largest number):
            the same bits with one pass less.

    Returns:
        contiguous tensor of x's shape.
    """
    return multiplied(x.contiguous(), multiplier, dtype, fits).to(dtype)


def multiplied(
    x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, fits: bool
) -> torch.Tensor:
    """The fp32 values that :func:`quantize` rounds to ``dtype``."""
    product = x * multiplier if x.dtype is torch.float32 else x.to(torch.float32).mul_(multiplier)
    if fits:
        return product
    # Needed: casts to e5m2 on CPU do not always saturate.
    limit = torch.finfo(dtype).max
    return product.clamp_(-limit, limit)


@custom_op("quantize_after(Tensor x, Tensor multiplier, ScalarType dtype, Tensor after) -> Tensor")
def quantize_after(
    x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, after: torch.Tensor
) -> torch.Tensor:
    """:func:`quantize` that a graph neither merges with another cast nor puts before ``after``."""
    return quantize(x, multiplier, dtype)


def _fake(
    x: torch.Tensor, multiplier: Any, dtype: torch.dtype, after: Any = None, *, fits: bool = False
) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


quantize.register_fake(_fake)
quantize_after.register_fake(_fake)
