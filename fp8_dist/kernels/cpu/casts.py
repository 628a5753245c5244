"""Amaxes, scales and casts on CPUs: faster than the portable implementations, with the same bits.

A single amax and a single scale are computed as Python numbers, which are fp64 as in the formula.
Operators on one-element tensors cost more, and would take most of the time of a small layer. Large
tensors are cast part by part, so that the fp32 values of a part stay in the CPU's cache and their
memory is reused.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from struct import Struct

import torch

from fp8_dist.kernels.block_gemm import dequantize_blocks, dequantized_with
from fp8_dist.kernels.blocks import cast_columns_of_blocks, quantize_blocks, reblock
from fp8_dist.kernels.cpu.upcast import upcast
from fp8_dist.kernels.quantization import multiplied, quantize
from fp8_dist.kernels.scale import EPS, Scaling, amax, scaling_from_amax

_PART = 65536  # elements
_FP32 = Struct("f")
_INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def _amax(x: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    integer = _INTEGERS.get(x.dtype)
    if x.numel() == 0 or integer is None:
        return amax.portable(x, dims)
    if dims is None:
        low, high = torch.aminmax(x)  # both are NaN if a value is NaN
        return _scalar(abs(max(-low.item(), high.item())))
    if not dims:
        return amax.portable(x, dims)
    # Without the sign, the bits of floats are ordered like their values, with NaN above all others.
    # torch finds the maximum along a dim faster for integers than for floats.
    bits = x.view(integer).bitwise_and(torch.iinfo(integer).max)
    return torch.amax(bits, tuple(dims), keepdim=True).view(x.dtype).to(torch.float32)


def _scaling_from_amax(
    amax: torch.Tensor, dtype: torch.dtype, round_scales_to_power_of_2: bool = False
) -> Scaling:
    if amax.ndim or round_scales_to_power_of_2:
        return scaling_from_amax.portable(amax, dtype, round_scales_to_power_of_2)
    # torch, too, divides a number by a tensor by multiplying by the tensor's reciprocal. Python's
    # max keeps a NaN that comes first. The scale is rounded twice, to fp64 and to fp32, which
    # equals rounding once, because fp64 has more than twice the bits.
    (m,) = _FP32.unpack(_FP32.pack(1 / max(amax.item(), EPS) * torch.finfo(dtype).max))
    return _scalar(m), _scalar(1 / m if m else math.inf)


def _scalar(number: float) -> torch.Tensor:
    return torch.scalar_tensor(number, dtype=torch.float32, device="cpu")


def _quantize(
    x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, *, fits: bool = False
) -> torch.Tensor:
    if x.numel() <= _PART:
        return quantize.portable(x, multiplier, dtype, fits=fits)
    x = x.contiguous()
    qdata = torch.empty_like(x, dtype=dtype)
    for part, m, result in _parts(x, multiplier, qdata):
        result.copy_(multiplied(part, m, dtype, fits))
    return qdata


def _parts(
    x: torch.Tensor, multiplier: torch.Tensor, qdata: torch.Tensor
) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Split a contiguous tensor into parts, each with its multiplier and its part of ``qdata``."""
    if multiplier.numel() == 1:
        parts, results = (t.view(-1).split(_PART) for t in (x, qdata))
        return zip(parts, repeat(multiplier.view(())), results, strict=False)
    columns = x.shape[-1]
    rows = max(1, _PART // columns)
    multipliers: Iterable[torch.Tensor]
    if multiplier.shape == (*x.shape[:-1], 1):
        multipliers = multiplier.reshape(-1, 1).split(rows)
    elif multiplier.shape == (*[1] * (x.ndim - 1), columns):
        multipliers = repeat(multiplier.reshape(1, -1))
    else:  # neither one scale per row nor one per column
        return [(x, multiplier, qdata)]
    parts, results = (t.view(-1, columns).split(rows) for t in (x, qdata))
    return zip(parts, multipliers, results, strict=False)


def _quantize_blocks(
    x: torch.Tensor,
    exponents: torch.Tensor,
    dtype: torch.dtype,
    blocks: Sequence[int],
) -> torch.Tensor:
    rows, _, first_row, _ = blocks
    if x.numel() <= _PART or first_row or (rows > 1 and x.ndim > 2):
        return quantize_blocks.portable(x, exponents, dtype, blocks)
    x = x.contiguous()
    matrix, qdata = x.view(-1, x.shape[-1]), torch.empty_like(x, dtype=dtype)
    results, numbers = qdata.view(matrix.shape), exponents.view(-1, exponents.shape[-1])
    for part, of_rows in _slices(matrix, rows):
        quantized = quantize_blocks.portable(matrix[part], numbers[of_rows], dtype, blocks)
        results[part] = quantized
    return qdata


def _reblock(
    qdata: torch.Tensor,
    exponents: torch.Tensor,
    blocks: Sequence[int],
    rows: int,
    rule: str | None,
    transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    if qdata.numel() <= _PART or blocks[0] > 1 or transposed:
        return reblock.portable(qdata, exponents, blocks, rows, rule, transposed)
    result, found = torch.empty_like(qdata), []
    for part, _ in _slices(qdata, rows):  # old blocks have one row, and so have their exponents
        values = dequantize_blocks(qdata[part], exponents[part], blocks, torch.float32)
        result[part], numbers = cast_columns_of_blocks(values, qdata.dtype, rows, rule)
        found.append(numbers)
    return result, torch.cat(found)


def _slices(matrix: torch.Tensor, rows: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of rows that consist of whole blocks, with the slices of their exponents."""
    count = max(1, _PART // (rows * matrix.shape[1]))  # rows of blocks
    for first in range(0, -(-len(matrix) // rows), count):
        yield slice(first * rows, (first + count) * rows), slice(first, first + count)


amax.register("cpu", _amax)
scaling_from_amax.register("cpu", _scaling_from_amax)
quantize.register("cpu", _quantize)
quantize_blocks.register("cpu", _quantize_blocks)
reblock.register("cpu", _reblock)
dequantize_blocks.register("cpu", partial(dequantized_with, upcast))
