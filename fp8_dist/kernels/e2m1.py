"""Casts to E2M1, the values of MXFP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

All of them are numbers of e4m3, so the data of a cast is an e4m3 tensor, which GEMMs take as it is.
On the wire it is *packed*: two codes of four bits in each byte, that of the even column in the low
bits, as in MX files. A code is a sign and the index of a magnitude in the list above.

Blocks and exponents are those of :mod:`fp8_dist.kernels.blocks`. The exponent follows from the
amax: if ``amax = f * 2 ** p``, with ``1 <= f < 2``, the scale is ``2 ** (p - 2)``, or twice that if
f is above the limit of the rule:

* ``"ceil"``: above 1.5. No value saturates.
* ``"even"``: from 1.75 on, where the amax itself would be rounded to ``2 ** (p + 1)``.
* ``"floor"``: never; the rule of OCP Microscaling Formats v1.0 (section 6.3).

Values beyond 6 times the scale saturate. A block with a non-finite value has the exponent NaN and
codes of 0, because E2M1 has no NaN.
"""

import math
from collections.abc import Sequence

import torch

from fp8_dist.kernels.blocks import (
    NAN_EXPONENT,
    block_amaxes,
    empty_exponents,
    powers_of_2,
    scaled_by,
)
from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.kernels.quantization import Tensors, as_matrix, empty_copies, transposed_copy

# The dtype of packed data. It is sent as uint8, because no backend knows it.
E2M1_X2 = torch.float4_e2m1fn_x2

LARGEST = 6.0

# Added to the bits of an amax, they carry into its exponent if it is above the limit of the rule.
CARRIES = {"ceil": 0x3FFFFF, "even": 0x200000, "floor": 0}


def empty_packed(x: torch.Tensor) -> torch.Tensor:
    """Allocate packed data of the values ``[..., K]``, uninitialized."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)


@custom_op(
    "cast_e2m1(Tensor x, Tensor? exponents, int[] blocks, str rule, bool[] transposed, bool packs) "
    "-> Tensor[]",
    fake=lambda x, exponents, blocks, rule, transposed, packs: [
        *([empty_exponents(x, blocks)] if exponents is None else []),
        *([empty_packed(x)] if packs else empty_copies(x, torch.float8_e4m3fn, transposed)),
    ],
)
def cast_e2m1(
    x: torch.Tensor,
    exponents: torch.Tensor | None,
    blocks: Sequence[int],
    rule: str,
    transposed: Sequence[bool],
    packs: bool,
) -> Tensors:
    """Cast a local tensor to E2M1, to nearest, ties to even.

    Args:
        x: ``[..., M, K]``, floating point.
        exponents: those of the blocks; ``None``: they are computed.
        blocks: see :mod:`fp8_dist.kernels.blocks`.
        rule: the rule of the exponents.
        transposed: the layout of each e4m3 copy (see :mod:`fp8_dist.kernels.quantization`).
        packs: pack the data instead of making copies. K must be even.

    Returns:
        The exponents, uint8, if they are computed; then the copies, or the packed data, uint8
        ``[..., M, K / 2]``.
    """
    found = []
    if exponents is None:
        found = [exponents := exponents_of(block_amaxes(x, blocks), rule)]
    if not (transposed or packs):
        return found
    # The smallest exponent means zeros, as in other casts in blocks.
    scales = powers_of_2(exponents).masked_fill_(exponents == 0, math.inf)
    scaled = scaled_by(x.to(torch.float32), scales.reciprocal_(), blocks)
    data = _rounded(scaled).to(torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    if packs:
        return [*found, pack_e2m1.portable(data)]
    return [*found, *[transposed_copy(as_matrix(data)) if t else data for t in transposed]]


def exponents_of(amax: torch.Tensor, rule: str) -> torch.Tensor:
    """Compute the exponents, uint8, of blocks from their amaxes (fp32, any shape)."""
    bits = amax.view(torch.int32)
    exponents = ((bits + CARRIES[rule]) >> 23).sub_(2).clamp_(min=0)
    return exponents.masked_fill_(bits >> 23 == NAN_EXPONENT, NAN_EXPONENT).to(torch.uint8)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 values to those of E2M1. NaN becomes 0."""
    # Values of a binade are half of its power of two apart, and those below 1 like those above.
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(1, 4)
    steps = (x.clamp(-LARGEST, LARGEST) / power).mul_(2).round_()
    return steps.mul_(power).mul_(0.5).nan_to_num_(0)


@custom_op("pack_e2m1(Tensor qdata) -> Tensor", fake=empty_packed)
def pack_e2m1(qdata: torch.Tensor) -> torch.Tensor:
    """Pack e4m3 data ``[..., K]`` that has values of E2M1 alone; uint8 ``[..., K / 2]``."""
    code = qdata.contiguous().view(torch.uint8)
    size = code & 0x7F
    # 0, 0.5, 1, 1.5, ... are 0, 0x30, 0x38, 0x3C, ...; from 1 on, each is 4 above the one before.
    index = torch.where(size < 0x38, size >> 5, (size >> 2) - 12)
    index |= (code & 0x80) >> 4
    return index[..., 0::2] | index[..., 1::2] << 4


@custom_op("unpack_e2m1(Tensor packed, Tensor(a!) out) -> ()", fake=lambda packed, out: None)
def unpack_e2m1(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Write packed data ``[..., K / 2]`` to ``out``, e4m3 ``[..., K]``; both are contiguous."""
    pairs = out.view(torch.uint8).view(-1, 2)
    flat = packed.view(torch.uint8).view(-1)
    for column, code in enumerate((flat & 0xF, flat >> 4)):
        index = code & 7
        size = torch.where(index < 2, index * 0x30, (index + 12) << 2)
        pairs[:, column] = size | (code & 8) << 4
