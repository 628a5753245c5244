"""amax, and the one formula from amax to scale.

With ``fp8_max`` the largest finite value of the target dtype::

    m     = float32(float64(fp8_max) / max(float64(amax), 1e-12))
    m     = exp2(floor(log2(m)))                  # round_scales_to_power_of_2
    qdata = saturate(float32(x) * m)
    scale = 1 / m                                 # fp32, dequantization: x ~= qdata * scale

A non-finite amax gives ``m`` of 0 or NaN and a scale of inf or NaN: every value that the scale
covers dequantizes to NaN (``0 * inf``), which is how one NaN on one rank becomes visible on all.

The epsilon and the rounding are torchao's, so that its scales are reproduced bit for bit. These
steps, and the cast (:mod:`fp8_dist.kernels.quantize`), are custom operators, opaque to compilers:
eager, aot_eager and inductor produce the same bits.
"""

import math
from collections.abc import Sequence
from struct import Struct

import torch

from fp8_dist.torch_internals import no_one_watches

EPS = 1e-12
CPU = torch.device("cpu")
_FP32 = Struct("f")

# The quantization multiplier and the scale, fp32, of one shape.
Scaling = tuple[torch.Tensor, torch.Tensor]


_LIB = torch.library.Library("fp8_dist", "FRAGMENT")
for _schema in (
    "amax(Tensor x, int[]? dims=None) -> Tensor",
    "scaling_from_amax(Tensor amax, ScalarType dtype, bool power_of_2) -> (Tensor, Tensor)",
):
    _LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def amax(x: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    """Maximum of absolute values of a local tensor.

    Args:
        x: any shape, floating point; where there are no elements amax is 0.
        dims: the dims to reduce, which keep size 1; ``None``: all, to a 0-dim tensor.

    Returns:
        fp32. NaN where ``x`` holds one, inf where it holds one and no NaN.
    """
    if no_one_watches(x):
        plain = x.detach() if x.requires_grad else x
        return _amax(plain, None if dims is None else list(dims))
    return torch.ops.fp8_dist.amax(x, dims)


def scaling_from_amax(
    amax: torch.Tensor, dtype: torch.dtype, round_scales_to_power_of_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantization multiplier ``m`` and the dequantization scale of the formula above.

    Args:
        amax: fp32, any shape (one element per scale).
        dtype: the float8 dtype whose largest finite value amax is mapped to.
        round_scales_to_power_of_2: take ``exp2(floor(log2(m)))`` in fp32 for ``m``.

    Returns:
        (multiplier, scale), fp32 tensors of amax's shape.
    """
    if no_one_watches(amax):
        return _scaling_from_amax(amax, dtype, round_scales_to_power_of_2)
    return torch.ops.fp8_dist.scaling_from_amax(amax, dtype, round_scales_to_power_of_2)


def local_scaling(
    x: torch.Tensor,
    dtype: torch.dtype,
    dims: Sequence[int] | None,
    round_scales_to_power_of_2: bool = False,
) -> Scaling:
    """:func:`scaling_from_amax` of :func:`amax` a tensor that is whole where it is."""
    if dims is None and not round_scales_to_power_of_2 and x.is_cpu and no_one_watches(x):
        return _scaling_of_number(_largest(x.detach() if x.requires_grad else x), dtype)
    return scaling_from_amax(amax(x, dims), dtype, round_scales_to_power_of_2)


def _amax(x: torch.Tensor, dims: list[int] | None = None) -> torch.Tensor:
    if x.numel() == 0:
        return torch.zeros(amax_shape(x, dims), dtype=torch.float32, device=x.device)
    if dims is None:
        if x.is_cpu:
            return torch.scalar_tensor(_largest(x), dtype=torch.float32, device=x.device)
        low, high = torch.aminmax(x)
        # maximum, unlike Python's max, keeps a NaN.
        largest = torch.maximum(low.neg(), high)
    elif dims and x.dtype in _INTEGERS:
        # Without their sign, the bits of floats are ordered like their values, NaN above all; and
        # the maximum of integers along a dim is found four times faster on CPUs.
        integer = _INTEGERS[x.dtype]
        bits = x.view(integer).bitwise_and(torch.iinfo(integer).max)
        largest = torch.amax(bits, dims, keepdim=True).view(x.dtype)
    else:
        largest = torch.amax(x.abs(), dims, keepdim=True) if dims else x
    # abs clears the sign of a NaN and of -0.0, so that the bits of an amax, read as an integer,
    # are ordered like its values (fp8_dist.mesh.amax).
    return largest.to(torch.float32).abs()


def _largest(x: torch.Tensor) -> float:
    """The amax of a CPU tensor: Python is quicker with a number than torch with a tensor."""
    if x.numel() == 0:
        return 0.0
    low, high = torch.aminmax(x)
    if x.dtype is torch.float64:
        low, high = low.to(torch.float32), high.to(torch.float32)
    return abs(max(-low.item(), high.item()))  # (Of a NaN both are NaN.)


_INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}


def amax_shape(x: torch.Tensor, dims: list[int] | None) -> list[int]:
    """The shape of :func:`amax`."""
    return [] if dims is None else [1 if d in dims else n for d, n in enumerate(x.shape)]


def _scaling_from_amax(
    amax: torch.Tensor, dtype: torch.dtype, power_of_2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if amax.ndim == 0 and amax.is_cpu and not power_of_2:
        return _scaling_of_number(amax.item(), dtype)
    m = (torch.finfo(dtype).max / amax.to(torch.float64).clamp(min=EPS)).to(torch.float32)
    if power_of_2:
        m = torch.exp2(torch.floor(torch.log2(m)))
    return m, torch.reciprocal(m)


def _scaling_of_number(amax: float, dtype: torch.dtype) -> Scaling:
    m, scale = (
        torch.scalar_tensor(number, dtype=torch.float32, device=CPU)
        for number in numbers_from_amax(amax, dtype)
    )
    return m, scale


def numbers_from_amax(amax: float, dtype: torch.dtype) -> tuple[float, float]:
    """The formula for one multiplier and scale in Python, whose floats are fp64.

    The same roundings, in less time. (1 / m is rounded to fp32 by whoever makes a tensor of it: as
    if once, since fp64 has more than twice its bits.)
    """
    # As torch divides a number by a tensor: by its reciprocal. (max keeps a NaN that comes first.)
    (m,) = _FP32.unpack(_FP32.pack(1 / max(amax, EPS) * torch.finfo(dtype).max))
    return m, 1 / m if m else math.inf


_LIB.impl("amax", _amax, "CompositeExplicitAutograd")
_LIB.impl("scaling_from_amax", _scaling_from_amax, "CompositeExplicitAutograd")
AMAX_OP = torch.ops.fp8_dist.amax.default


@torch.library.register_fake("fp8_dist::amax", lib=_LIB)
def _amax_fake(x: torch.Tensor, dims: list[int] | None = None) -> torch.Tensor:
    return x.new_empty(amax_shape(x, dims), dtype=torch.float32)


@torch.library.register_fake("fp8_dist::scaling_from_amax", lib=_LIB)
def _scaling_from_amax_fake(
    amax: torch.Tensor, dtype: torch.dtype, power_of_2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(amax), torch.empty_like(amax)
