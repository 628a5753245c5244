"""Casts of local tensors to float8, by the formula of :mod:`fp8_dist.kernels.scale`."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from fp8_dist.kernels.custom_op import custom_op


@custom_op("quantize(Tensor x, Tensor multiplier, ScalarType dtype, *, bool fits=False) -> Tensor")
def quantize(
    x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, *, fits: bool = False
) -> torch.Tensor:
    """Cast ``saturate(float32(x) * m)`` to ``dtype``.

    Args:
        x: any shape, floating point, local.
        multiplier: fp32, 0-dim or of size 1 along the dims that it covers.
        dtype: a float8 dtype.
        fits: whether the multiplier comes from an amax that no value of ``x`` exceeds. Nothing
            saturates then, because a rounded product is less than half a step above the largest
            number. This saves one pass and gives the same bits.

    Returns:
        A contiguous tensor of the shape of ``x``.
    """
    return multiplied(x.contiguous(), multiplier, dtype, fits).to(dtype)


def multiplied(
    x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, fits: bool
) -> torch.Tensor:
    """The fp32 values that :func:`quantize` rounds to ``dtype``."""
    product = x * multiplier if x.dtype is torch.float32 else x.to(torch.float32).mul_(multiplier)
    if fits:
        return product
    # Casts to e5m2 on CPU do not always saturate.
    limit = torch.finfo(dtype).max
    return product.clamp_(-limit, limit)


@custom_op("quantize_after(Tensor x, Tensor multiplier, ScalarType dtype, Tensor after) -> Tensor")
def quantize_after(
    x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, after: torch.Tensor
) -> torch.Tensor:
    """:func:`quantize` that a graph neither merges with another cast nor moves before ``after``."""
    return quantize(x, multiplier, dtype)


@custom_op(
    "quantize_each(Tensor first, Tensor[] others, Tensor multipliers, ScalarType dtype, "
    "bool of_rows) -> Tensor"
)
def quantize_each(
    first: torch.Tensor,
    others: Sequence[torch.Tensor],
    multipliers: torch.Tensor,
    dtype: torch.dtype,
    of_rows: bool,
) -> torch.Tensor:
    """:func:`quantize` of each of many local tensors on one device.

    Args:
        multipliers: fp32, flat, one for each tensor.
        of_rows: whether there is one for each row (along the last dim) of each tensor instead.

    Returns:
        The data of all tensors, flat, one after the other.
    """
    tensors = (first, *others)
    sizes = [math.prod(x.shape[:-1]) if of_rows else 1 for x in tensors]
    data = []
    for x, mine in zip(tensors, multipliers.split(sizes), strict=True):
        multiplier = mine.view(*x.shape[:-1], 1) if of_rows else mine.view(())
        data.append(quantize(x, multiplier, dtype).view(torch.uint8).view(-1))
    return torch.cat(data).view(dtype)


def fuses_many(x: torch.Tensor) -> bool:
    """Whether :func:`quantize_each` casts many tensors at once on this device."""
    return x.is_cuda


@quantize_each.register_fake
def _quantize_each_fake(
    first: torch.Tensor,
    others: Sequence[torch.Tensor],
    multipliers: torch.Tensor,
    dtype: torch.dtype,
    of_rows: bool,
) -> torch.Tensor:
    return first.new_empty(sum(x.numel() for x in (first, *others)), dtype=dtype)


def _fake(
    x: torch.Tensor, multiplier: Any, dtype: torch.dtype, after: Any = None, *, fits: bool = False
) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


quantize.register_fake(_fake)
quantize_after.register_fake(_fake)
