"""float8 data in a wider type, exactly and fast on CPUs.

torch converts float8 to bf16 one element at a time. But a float8 number is a bf16 number with its
sign and its 7 other bits moved into place: the same mantissa, and an exponent that is off by a
constant, which one multiplication repairs (subnormal numbers included). NaN and inf, and subnormal
bf16 numbers on a CPU that flushes them (``torch.set_flush_denormal``), are left to torch.
"""

from typing import NamedTuple

import torch

# Below, torch's own conversion is faster than that many passes.
FEW = 4096  # elements


class _Format(NamedTuple):
    shift: int  # of the 7 bits of a float8 number to their place in a bf16 one
    exponent: int  # log2 of what is then missing: 127 less the exponent bias of the format
    last_finite: int  # the 7 bits of the largest finite number


_FORMATS = {
    torch.float8_e4m3fn: _Format(shift=4, exponent=120, last_finite=0x7E),
    torch.float8_e5m2: _Format(shift=5, exponent=112, last_finite=0x7B),
}


class _HalfFormat(NamedTuple):
    shift: torch.Tensor  # what moves the 7 bits to their place in a fp16 number, as a product
    mask: torch.Tensor | None  # clears a copy of the sign among them
    factor: float  # what is then missing


def _int16(number: int) -> torch.Tensor:
    # (A Python number would be made a tensor in each call.)
    return torch.tensor(number, dtype=torch.int16, device="cpu")


_HALF_FORMATS = {
    torch.float8_e4m3fn: _HalfFormat(_int16(1 << 7), _int16(~(1 << 14)), 2.0**8),
    torch.float8_e5m2: _HalfFormat(_int16(1 << 8), None, 1.0),
}


def upcast(qdata: torch.Tensor, dtype: torch.dtype, is_finite: bool = False) -> torch.Tensor:
    """The values of ``qdata.to(dtype)``: float8 data, any shape, as bf16, fp32 or fp64.

    ``is_finite``: they are known to be finite.
    """
    if qdata.dtype is dtype:
        return qdata
    if qdata.numel() < FEW:
        # bfloat16() costs less than to(), and is the most frequent call.
        return qdata.bfloat16() if dtype is torch.bfloat16 else qdata.to(dtype)
    known = _FORMATS.get(qdata.dtype)
    if known is None or _flushes() or not (is_finite or _is_finite(qdata, known.last_finite)):
        # By way of bf16 here too, so that both ways give a NaN the same bits.
        return qdata.bfloat16().to(dtype)
    # int8 to int16 repeats the sign in all upper bits: it stands in bit 15 already. (A product is
    # a shift, but faster.)
    bits = qdata.view(torch.int8).to(torch.int16).mul_(1 << known.shift)
    bits.bitwise_and_((0x7F << known.shift) - 0x8000)
    return bits.view(torch.bfloat16).mul_(2.0**known.exponent).to(dtype)


def as_half(qdata: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Finite e4m3fn or e5m2 data as fp16 numbers and a factor that they lack, exactly.

    fp16 has their subnormal numbers as normal ones, so this is fast for all values.
    """
    shift, mask, factor = _HALF_FORMATS[qdata.dtype]
    bits = qdata.view(torch.int8).to(torch.int16).mul_(shift)
    if mask is not None:
        bits.bitwise_and_(mask)
    return bits.view(torch.float16), factor


def _is_finite(qdata: torch.Tensor, last: int) -> bool:
    """True if no code lies beyond the last finite one, of either sign."""
    if qdata.ndim == 2 and not qdata.is_contiguous():
        qdata = qdata.t()  # max would make a copy
    # As signed numbers the codes of positive values are the largest, as unsigned ones the others.
    largest = qdata.view(torch.int8).max().item(), qdata.view(torch.uint8).max().item()
    return largest[0] <= last and largest[1] <= 0x80 + last


def _flushes(tiny: float = 5e-324) -> bool:
    """True if this thread takes subnormal numbers for zero, in Python as in torch."""
    return tiny * 1.0 == 0.0
