"""Casts of large tensors on CPUs: the bits of the portable implementation, in less time."""

from collections.abc import Iterable
from itertools import repeat

import torch

from fp8_dist.kernels.quantization import multiplied, quantize

_BLOCK = 65536  # elements


def _quantize(
    x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, *, fits: bool = False
) -> torch.Tensor:
    if x.numel() <= _BLOCK:
        return quantize.portable(x, multiplier, dtype, fits=fits)
    # Block by block, the fp32 values stay in the CPU's cache and are not allocated anew each time.
    x = x.contiguous()
    qdata = torch.empty_like(x, dtype=dtype)
    for block, m, result in _blocks(x, multiplier, qdata):
        result.copy_(multiplied(block, m, dtype, fits))
    return qdata


def _blocks(
    x: torch.Tensor, multiplier: torch.Tensor, qdata: torch.Tensor
) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Parts of a contiguous tensor, each with its multiplier and its part of the result."""
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


quantize.register("cpu", _quantize)
