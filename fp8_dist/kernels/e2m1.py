"""Values of E2M1, the element format of MXFP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

All of them are e4m3 values. So a cast produces an e4m3 tensor, which GEMMs take as it is. On the
wire it is *packed*: two codes of four bits in each byte, the code of the even column in the low
bits, as in MX files. A code is a sign and the index of a magnitude in the list above.

The casts are those of :mod:`fp8_dist.kernels.blocks`, with ``E2M1_X2`` as their dtype. The exponent
of a block follows from its amax: if ``amax = f * 2 ** p``, with ``1 <= f < 2``, the scale is
``2 ** (p - 2)``, or twice that if f is above the limit of the rule:

* ``"ceil"``: above 1.5. No value saturates.
* ``"even"``: from 1.75 on, where the amax itself would be rounded to ``2 ** (p + 1)``.
* ``"floor"``: never; the rule of OCP Microscaling Formats v1.0 (section 6.3).

Values beyond 6 times the scale saturate. E2M1 has no NaN: if a block has a non-finite value, its
exponent is NaN and its codes are 0.
"""

import torch

from fp8_dist.kernels.custom_op import custom_op

# The dtype of packed data. It is sent as uint8, because no backend supports it.
E2M1_X2 = torch.float4_e2m1fn_x2

# Added to the bits of an amax, they carry into its exponent if it is above the limit of the rule.
CARRIES = {"ceil": 0x3FFFFF, "even": 0x200000, "floor": 0}


def data_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the data of a cast to a dtype: e4m3 for E2M1."""
    return torch.float8_e4m3fn if dtype is E2M1_X2 else dtype


def round_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 values to nearest, ties to even. NaN becomes 0."""
    # E2M1 values in [2^k, 2^(k + 1)) are 2^(k - 1) apart; those below 1 are 0.5 apart, as if k = 0.
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(1, 4)
    steps = (x.clamp(-6, 6) / power).mul_(2).round_()
    return steps.mul_(power).mul_(0.5).nan_to_num_(0)


def empty_packed(x: torch.Tensor) -> torch.Tensor:
    """Allocate packed data of the values ``[..., K]``, uninitialized."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)


@custom_op(fake=empty_packed)
def pack_e2m1(qdata: torch.Tensor) -> torch.Tensor:
    """Pack e4m3 data ``[..., K]`` that has only values of E2M1; uint8 ``[..., K / 2]``."""
    code = qdata.contiguous().view(torch.uint8)
    size = code & 0x7F
    # 0, 0.5, 1, 1.5, ... are 0, 0x30, 0x38, 0x3C, ...; from 1 on, each is 4 above the one before.
    index = torch.where(size < 0x38, size >> 5, (size >> 2) - 12) | (code & 0x80) >> 4
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
