"""Casts of local tensors to float8, by the formula of :mod:`fp8_dist.kernels.scale`.

The operators are opaque to compilers, as those there. In eager code CPUs get their own ways through
them, which give the same bits: large tensors block by block, small ones in the fewest operators.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import torch

from fp8_dist.kernels.scale import CPU, local_scaling, numbers_from_amax
from fp8_dist.torch_internals import no_one_watches

_LIB = torch.library.Library("fp8_dist", "FRAGMENT")
for _schema in (
    "quantize(Tensor x, Tensor multiplier, ScalarType dtype) -> Tensor",
    "quantize_after(Tensor x, Tensor multiplier, ScalarType dtype, Tensor after) -> Tensor",
):
    _LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


class Quantized(NamedTuple):
    """A local tensor in float8 (a Float8Tensor costs more, where no tensor is needed)."""

    qdata: torch.Tensor
    scale: torch.Tensor


def quantize_whole(
    x: torch.Tensor,
    dtype: torch.dtype,
    dims: Sequence[int] | None,
    round_scales_to_power_of_2: bool = False,
) -> tuple[Quantized, torch.Tensor]:
    """:func:`quantize` by the :func:`local_scaling` of the same tensor.

    Returns:
        The cast, and the multiplier that it was made with (of the scale's size, perhaps with a dim
        more: ``view`` it where that matters).
    """
    if dims is None and not round_scales_to_power_of_2 and _are_few(x) and no_one_watches(x):
        return _quantize_few((x.detach() if x.requires_grad else x).contiguous(), dtype)
    m, scale = local_scaling(x, dtype, dims, round_scales_to_power_of_2)
    return Quantized(quantize(x, m, dtype, fits=True), scale), m


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
_NARROW = (torch.bfloat16, torch.float16, torch.float32)  # fp32 holds their values


def _are_few(x: torch.Tensor) -> bool:
    return x.is_cpu and 0 < x.numel() <= _FEW and x.ndim > 0 and x.dtype in _NARROW


def _quantize_few(x: torch.Tensor, dtype: torch.dtype) -> tuple[Quantized, torch.Tensor]:
    """A contiguous tensor of few elements, with one scale: all in one, as its time is overhead."""
    low, high = torch.aminmax(x)
    number, inverse = numbers_from_amax(abs(max(-low.item(), high.item())), dtype)
    m = torch.full((1,), number, dtype=torch.float32, device=CPU)
    qdata = torch.mul(x, m, out=torch.empty_like(x, dtype=dtype))
    return Quantized(qdata, torch.scalar_tensor(inverse, dtype=torch.float32, device=CPU)), m


def _blocks(
    x: torch.Tensor, multiplier: torch.Tensor, qdata: torch.Tensor
) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Parts of a contiguous tensor with what they are multiplied by, and where they are written."""
    if multiplier.numel() == 1:
        blocks, results = (t.view(-1).split(_BLOCK) for t in (x, qdata))
        return zip(blocks, repeat(multiplier.view(())), results, strict=False)
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


_LIB.impl("quantize", _quantize, "CompositeExplicitAutograd")
_LIB.impl("quantize_after", _quantize_after, "CompositeExplicitAutograd")


@torch.library.register_fake("fp8_dist::quantize", lib=_LIB)
def _quantize_fake(x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@torch.library.register_fake("fp8_dist::quantize_after", lib=_LIB)
def _quantize_after_fake(
    x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, after: torch.Tensor
) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)
