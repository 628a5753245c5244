"""amax and scale on CPUs: the bits of the portable implementations, in less time.

A single amax and a single scale are computed as Python numbers, which are fp64 like the formula. An
operator on a one-element tensor costs more, and would take most of the time of a small layer.
"""

import math
from collections.abc import Sequence
from struct import Struct

import torch

from fp8_dist.kernels.scale import EPS, Scaling, amax, scaling_from_amax

_FP32 = Struct("f")

_INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def _amax(x: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    integer = _INTEGERS.get(x.dtype)
    if x.numel() == 0 or integer is None:
        return amax.portable(x, dims)
    if dims is None:
        low, high = torch.aminmax(x)  # both NaN if x holds one
        return _scalar(abs(max(-low.item(), high.item())))
    if not dims:
        return amax.portable(x, dims)
    # Without their sign, the bits of floats are ordered like their values, NaN above all; and torch
    # finds the maximum of integers along a dim faster than that of floats.
    bits = x.view(integer).bitwise_and(torch.iinfo(integer).max)
    return torch.amax(bits, tuple(dims), keepdim=True).view(x.dtype).to(torch.float32)


def _scaling_from_amax(
    amax: torch.Tensor, dtype: torch.dtype, round_scales_to_power_of_2: bool = False
) -> Scaling:
    if amax.ndim or round_scales_to_power_of_2:
        return scaling_from_amax.portable(amax, dtype, round_scales_to_power_of_2)
    # torch also divides a number by a tensor through the reciprocal. max keeps a NaN that comes
    # first. Rounding the scale from fp64 to fp32 is like rounding once, because fp64 has twice the
    # bits.
    (m,) = _FP32.unpack(_FP32.pack(1 / max(amax.item(), EPS) * torch.finfo(dtype).max))
    return _scalar(m), _scalar(1 / m if m else math.inf)


def _scalar(number: float) -> torch.Tensor:
    return torch.scalar_tensor(number, dtype=torch.float32, device="cpu")


amax.register("cpu", _amax)
scaling_from_amax.register("cpu", _scaling_from_amax)
