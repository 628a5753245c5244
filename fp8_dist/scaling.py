"""amax, and the one formula from amax to scale.

With ``fp8_max`` the largest finite value of the target dtype::

    m     = float32(float64(fp8_max) / max(float64(amax), 1e-12))
    m     = exp2(floor(log2(m)))                  # round_scales_to_power_of_2
    qdata = saturate(float32(x) * m)
    scale = 1 / m                                 # fp32, dequantization: x ~= qdata * scale

A non-finite amax gives ``m`` of 0 or NaN and a scale of inf or NaN: every value that the scale
covers dequantizes to NaN (``0 * inf``), which is how one NaN on one rank becomes visible on all.

The epsilon and the rounding are torchao's, so that its scales are reproduced bit for bit. All
three steps are custom operators, opaque to compilers: eager, aot_eager and inductor produce the
same bits.
"""

import math
from collections.abc import Sequence

import torch

from fp8_dist.casts import Covers
from fp8_dist.torch_internals import no_one_watches

EPS = 1e-12

# The quantization multiplier and the scale, fp32, of one shape.
Scaling = tuple[torch.Tensor, torch.Tensor]

_LIB = torch.library.Library("fp8_dist", "FRAGMENT")
for _schema in (
    "amax(Tensor x, int[]? dims=None) -> Tensor",
    "scaling_from_amax(Tensor amax, ScalarType dtype, bool power_of_2) -> (Tensor, Tensor)",
    "quantize(Tensor x, Tensor multiplier, ScalarType dtype) -> Tensor",
    "quantize_after(Tensor x, Tensor multiplier, ScalarType dtype, Tensor after) -> Tensor",
):
    _LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def amax(x: torch.Tensor, covers: Covers = "tensor") -> torch.Tensor:
    """Maximum of absolute values of a local tensor.

    Args:
        x: any shape, floating point; where there are no elements amax is 0.
        covers: what one scale covers: all of ``x``, or each row or column of ``[..., columns]``.

    Returns:
        fp32: 0-dim, ``[..., 1]`` for rows, ``[1, ..., columns]`` for columns. NaN where ``x``
        holds one, inf where it holds one and no NaN.
    """
    return amax_over(x, reduced_dims(covers, x.ndim))


def amax_over(x: torch.Tensor, dims: Sequence[int] | None) -> torch.Tensor:
    """Maximum of absolute values over some dims, which keep size 1; ``None``: all, to 0-dim."""
    if no_one_watches(x):
        plain = x.detach() if x.requires_grad else x
        return _amax(plain, None if dims is None else list(dims))
    return torch.ops.fp8_dist.amax(x, dims)


def reduced_dims(covers: Covers, ndim: int) -> list[int] | None:
    """The dims of an N-D tensor that one scale covers; ``None``: all."""
    if covers == "tensor":
        return None
    return [ndim - 1] if covers == "row" else list(range(ndim - 1))


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
    """:func:`scaling_from_amax` of :func:`amax_over` a tensor that is whole where it is."""
    if dims is None and not round_scales_to_power_of_2 and x.is_cpu and no_one_watches(x):
        return _scaling_of_number(_largest(x), dtype)
    return scaling_from_amax(amax_over(x, dims), dtype, round_scales_to_power_of_2)


def quantize(x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``saturate(float32(x) * m)`` as ``dtype``.

    Args:
        x: any shape, floating point, local.
        multiplier: fp32, 0-dim or of size 1 along the dims that it covers.
        dtype: a float8 dtype.

    Returns:
        contiguous tensor of x's shape.
    """
    if no_one_watches(x):
        return _quantize(x.detach() if x.requires_grad else x, multiplier, dtype)
    return torch.ops.fp8_dist.quantize(x, multiplier, dtype)


def quantize_after(
    x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, after: torch.Tensor
) -> torch.Tensor:
    """:func:`quantize`, which a graph can't merge with an earlier cast of ``x``, nor put earlier.

    Args:
        x: see :func:`quantize`, as the next two.
        multiplier: see there.
        dtype: see there.
        after: what must be known before.
    """
    if torch.compiler.is_compiling():
        return torch.ops.fp8_dist.quantize_after(x, multiplier, dtype, after)
    return quantize(x, multiplier, dtype)


def _amax(x: torch.Tensor, dims: list[int] | None = None) -> torch.Tensor:
    if x.numel() == 0:
        return torch.zeros(amax_shape(x, dims), dtype=torch.float32, device=x.device)
    if dims is None:
        if x.is_cpu:
            return torch.scalar_tensor(_largest(x), dtype=torch.float32, device=x.device)
        low, high = torch.aminmax(x)
        # maximum, unlike Python's max, keeps a NaN.
        largest = torch.maximum(low.neg(), high)
    elif dims and x.dtype in _SAME_SIZE:
        # Without their sign, the bits of floats are ordered like their values, NaN above all; and
        # the maximum of integers along a dim is found four times faster on CPUs.
        integer = _SAME_SIZE[x.dtype]
        bits = x.view(integer).bitwise_and(torch.iinfo(integer).max)
        largest = torch.amax(bits, dims, keepdim=True).view(x.dtype)
    else:
        largest = torch.amax(x.abs(), dims, keepdim=True) if dims else x
    # abs clears the sign of a NaN and of -0.0, so that the bits of an amax, read as an integer,
    # are ordered like its values (fp8_dist.sharding).
    return largest.to(torch.float32).abs()


def _largest(x: torch.Tensor) -> float:
    """The amax of a CPU tensor: Python is quicker with a number than torch with a tensor."""
    if x.numel() == 0:
        return 0.0
    low, high = torch.aminmax(x.detach() if x.requires_grad else x)
    return abs(max(-low.item(), high.item()))  # (Of a NaN both are NaN.)


_SAME_SIZE = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}


def amax_shape(x: torch.Tensor, dims: list[int] | None) -> list[int]:
    """The shape of :func:`amax_over`."""
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
    """The formula in Python, whose floats are fp64: the same roundings, in less time."""
    # As torch divides a number by a tensor: by its reciprocal. (max keeps a NaN that comes first.)
    number = 1 / max(amax, EPS) * torch.finfo(dtype).max
    m = torch.scalar_tensor(number, dtype=torch.float32, device="cpu")
    rounded = m.item()
    scale = 1 / rounded if rounded else math.inf
    return m, torch.scalar_tensor(scale, dtype=torch.float32, device="cpu")


_BLOCK = 65536  # elements


def _quantize(x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x = x.contiguous()
    if multiplier.ndim or not x.is_cpu or x.numel() <= _BLOCK:
        return _scaled(x, multiplier, dtype).to(dtype)
    # Block by block: what is wide stays in the CPU's cache, and is not allocated anew each time.
    qdata = torch.empty_like(x, dtype=dtype)
    for block, result in zip(x.view(-1).split(_BLOCK), qdata.view(-1).split(_BLOCK), strict=True):
        result.copy_(_scaled(block, multiplier, dtype))
    return qdata


def _scaled(x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    # The clamp is needed: casts to e5m2 on CPU do not always saturate.
    if x.dtype is torch.float32:
        return (x * multiplier).clamp_(-limit, limit)
    return x.to(torch.float32).mul_(multiplier).clamp_(-limit, limit)


def _quantize_after(
    x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, after: torch.Tensor
) -> torch.Tensor:
    return _quantize(x, multiplier, dtype)


_LIB.impl("quantize_after", _quantize_after, "CompositeExplicitAutograd")
_LIB.impl("amax", _amax, "CompositeExplicitAutograd")
_LIB.impl("scaling_from_amax", _scaling_from_amax, "CompositeExplicitAutograd")
_LIB.impl("quantize", _quantize, "CompositeExplicitAutograd")
AMAX_OP = torch.ops.fp8_dist.amax.default


@torch.library.register_fake("fp8_dist::amax", lib=_LIB)
def _amax_fake(x: torch.Tensor, dims: list[int] | None = None) -> torch.Tensor:
    return x.new_empty(amax_shape(x, dims), dtype=torch.float32)


@torch.library.register_fake("fp8_dist::scaling_from_amax", lib=_LIB)
def _scaling_from_amax_fake(
    amax: torch.Tensor, dtype: torch.dtype, power_of_2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(amax), torch.empty_like(amax)


@torch.library.register_fake("fp8_dist::quantize", lib=_LIB)
def _quantize_fake(x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@torch.library.register_fake("fp8_dist::quantize_after", lib=_LIB)
def _quantize_after_fake(
    x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, after: torch.Tensor
) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)
