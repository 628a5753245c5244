"""The amax, and the formula that computes a scale from it.

With ``fp8_max`` the largest finite value of the target dtype::

    m     = float32(float64(fp8_max) / max(float64(amax), 1e-12))
    m     = exp2(floor(log2(m)))                  # round_scales_to_power_of_2
    qdata = saturate(float32(x) * m)
    scale = 1 / m                                 # fp32, dequantization: x ~= qdata * scale

A non-finite amax gives ``m`` of 0 or NaN and a scale of inf or NaN. Every value that the scale
covers then dequantizes to NaN (``0 * inf``), so a NaN on one rank becomes visible on all ranks.

The epsilon and the rounding are torchao's, so that its scales are reproduced bit for bit. All
portable code takes multipliers from :func:`scaling_from_amax`. Two fast paths write the formula
again: Triton kernels compute it in registers (``cuda/triton/rounding.py``), and a CPU computes a
single scale as a Python number (``cpu/casts.py``).
"""

import math
from collections.abc import Sequence

import torch

from fp8_dist.kernels.custom_op import custom_op

EPS = 1e-12

# The quantization multiplier and the scale, fp32, of the same shape.
Scaling = tuple[torch.Tensor, torch.Tensor]


def _empty_amax(x: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    shape = [] if dims is None else [1 if d in dims else n for d, n in enumerate(x.shape)]
    return x.new_empty(shape, dtype=torch.float32)


@custom_op("amax(Tensor x, int[]? dims=None) -> Tensor", fake=_empty_amax)
def amax(x: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    """Maximum of the absolute values of a local tensor, fp32; NaN if it contains a NaN.

    Args:
        x: any shape, floating point. The amax of no elements is 0.
        dims: dims to reduce, which keep size 1. ``None`` reduces all dims to a 0-dim tensor.
    """
    if x.numel() == 0:
        return _empty_amax(x, dims).zero_()
    if dims is None:
        low, high = torch.aminmax(x)
        # maximum, unlike Python's max, keeps a NaN.
        largest = torch.maximum(low.neg(), high)
    else:
        largest = torch.amax(x.abs(), tuple(dims), keepdim=True) if dims else x
    # abs clears the sign of a NaN and of -0.0, so that the bits of an amax, read as an integer,
    # are ordered like its values (fp8_dist.mesh.amax).
    return largest.to(torch.float32).abs()


def covered_dims(covers: str, ndim: int) -> tuple[int, ...] | None:
    """Dims that a scale of a "tensor", a "row" or a "column" covers; ``None`` for all dims."""
    if covers == "tensor":
        return None
    return (ndim - 1,) if covers == "row" else tuple(range(ndim - 1))


@custom_op(
    "amaxes(Tensor x, str[] covers) -> Tensor[]",
    fake=lambda x, covers: [_empty_amax(x, covered_dims(name, x.ndim)) for name in covers],
)
def amaxes(x: torch.Tensor, covers: Sequence[str]) -> list[torch.Tensor]:
    """:func:`amax` over the :func:`covered_dims` of each name in ``covers``."""
    return [amax(x, covered_dims(name, x.ndim)) for name in covers]


def count_of_each(tensors: Sequence[torch.Tensor], of_rows: bool) -> list[int]:
    """Number of amaxes of each of many tensors: one, or one per row."""
    return [math.prod(x.shape[:-1]) if of_rows else 1 for x in tensors]


@custom_op(
    "amax_of_each(Tensor first, Tensor[] others, bool of_rows=False) -> Tensor",
    fake=lambda first, others, of_rows=False: first.new_empty(
        sum(count_of_each([first, *others], of_rows)), dtype=torch.float32
    ),
)
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


@custom_op(
    "scaling_from_amax(Tensor amax, ScalarType dtype, bool round_scales_to_power_of_2=False) "
    "-> (Tensor, Tensor)",
    fake=lambda amax, *_: (torch.empty_like(amax), torch.empty_like(amax)),
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
