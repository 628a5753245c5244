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
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import torch

from fp8_dist.casts import Covers
from fp8_dist.torch_internals import no_one_watches

EPS = 1e-12

# The quantization multiplier and the scale, fp32, of one shape.
Scaling = tuple[torch.Tensor, torch.Tensor]


class Quantized(NamedTuple):
    """A local tensor in float8 (a Float8Tensor costs more, where no tensor is needed)."""

    qdata: torch.Tensor
    scale: torch.Tensor


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
    if no_one_watches(x):
        x = x.detach() if x.requires_grad else x
        return _local_scaling(x, dtype, dims, round_scales_to_power_of_2)
    return scaling_from_amax(amax_over(x, dims), dtype, round_scales_to_power_of_2)


def quantize_whole(
    x: torch.Tensor,
    dtype: torch.dtype,
    dims: Sequence[int] | None,
    round_scales_to_power_of_2: bool = False,
) -> Quantized:
    """:func:`quantize` by the :func:`local_scaling` of the same tensor."""
    if not no_one_watches(x):
        m, scale = local_scaling(x, dtype, dims, round_scales_to_power_of_2)
        return Quantized(quantize(x, m, dtype), scale)
    x = x.detach() if x.requires_grad else x
    if dims is None and not round_scales_to_power_of_2 and _are_few(x):
        return _quantize_few(x.contiguous(), dtype)
    m, scale = _local_scaling(x, dtype, dims, round_scales_to_power_of_2)
    return Quantized(_quantize(x, m, dtype, True), scale)


def _local_scaling(
    x: torch.Tensor, dtype: torch.dtype, dims: Sequence[int] | None, power_of_2: bool
) -> Scaling:
    if dims is None and not power_of_2 and x.is_cpu:
        return _scaling_of_number(_largest(x), dtype)
    value = _amax(x, None if dims is None else list(dims))
    return _scaling_from_amax(value, dtype, power_of_2)


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
    if no_one_watches(x):
        return _quantize(x.detach() if x.requires_grad else x, multiplier, dtype, fits)
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
    low, high = torch.aminmax(x)
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
    m = torch.scalar_tensor(_multiplier(amax, dtype), dtype=torch.float32, device=_CPU)
    return m, m.reciprocal()


def _multiplier(amax: float, dtype: torch.dtype) -> float:
    """The formula in Python, whose floats are fp64: the same roundings, in less time."""
    # As torch divides a number by a tensor: by its reciprocal. (max keeps a NaN that comes first.)
    return 1 / max(amax, EPS) * torch.finfo(dtype).max


_CPU = torch.device("cpu")


_BLOCK = 65536  # elements


def _quantize(
    x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, fits: bool = False
) -> torch.Tensor:
    x = x.contiguous()
    if not x.is_cpu:
        return _scaled(x, multiplier, dtype, fits).to(dtype)
    if fits and _are_few(x):
        # One operator, where its time counts: by a multiplier that has dims the product is fp32.
        m = multiplier if multiplier.ndim else multiplier.view(1)
        return torch.mul(x, m, out=torch.empty_like(x, dtype=dtype))
    if x.numel() <= _BLOCK:
        return _scaled(x, multiplier, dtype, fits).to(dtype)
    # Block by block: what is wide stays in the CPU's cache, and is not allocated anew each time.
    qdata = torch.empty_like(x, dtype=dtype)
    for block, m, result in _blocks(x, multiplier, qdata):
        result.copy_(_scaled(block, m, dtype, fits))
    return qdata


_FEW = 4096  # elements


def _are_few(x: torch.Tensor) -> bool:
    return x.is_cpu and 0 < x.numel() <= _FEW and x.ndim > 0 and x.dtype in _SAME_SIZE


def _quantize_few(x: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """A contiguous tensor of few elements, with one scale: all in one, as its time is overhead."""
    low, high = torch.aminmax(x)
    number = _multiplier(abs(max(-low.item(), high.item())), dtype)
    m = torch.full((1,), number, dtype=torch.float32, device=_CPU)
    qdata = torch.mul(x, m, out=torch.empty_like(x, dtype=dtype))
    rounded = m.item()
    inverse = 1 / rounded if rounded else math.inf
    return Quantized(qdata, torch.scalar_tensor(inverse, dtype=torch.float32, device=_CPU))


def _blocks(
    x: torch.Tensor, multiplier: torch.Tensor, qdata: torch.Tensor
) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Parts of a contiguous tensor with what they are multiplied by, and where they are written."""
    if multiplier.numel() == 1:
        blocks, results = (t.view(-1).split(_BLOCK) for t in (x, qdata))
        return zip(blocks, repeat(multiplier), results, strict=False)
    columns = x.shape[-1]
    rows = max(1, _BLOCK // columns)
    parts: Iterable[torch.Tensor]
    if multiplier.shape == (*x.shape[:-1], 1):
        parts = multiplier.reshape(-1, 1).split(rows)
    elif multiplier.shape == (*[1] * (x.ndim - 1), columns):
        parts = repeat(multiplier.reshape(1, -1))
    else:  # scales along another dim than the first or the last
        return [(x, multiplier, qdata)]
    blocks, results = (t.view(-1, columns).split(rows) for t in (x, qdata))
    return zip(blocks, parts, results, strict=False)


def _scaled(
    x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, fits: bool
) -> torch.Tensor:
    wide = x * multiplier if x.dtype is torch.float32 else x.to(torch.float32).mul_(multiplier)
    if fits:
        return wide
    # Needed: casts to e5m2 on CPU do not always saturate.
    limit = torch.finfo(dtype).max
    return wide.clamp_(-limit, limit)


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
