"""Exact and fast conversion of float8 data to a wider type on CPUs.

torch converts float8 to bf16 one element at a time. A faster way moves the sign and the 7 other
bits of a float8 number into their places in a bf16 number. The mantissa is then right, and the
exponent is off by a constant, which one multiplication corrects, also for subnormal numbers. NaN
and inf, and subnormal bf16 numbers on a CPU that flushes them (``torch.set_flush_denormal``), are
left to torch.

Layers that share an input multiply it in turn, and each output gradient is multiplied twice, as it
is for grad_input and transposed for grad_weight. So the bf16 copy of the last left operand is kept.
"""

from typing import NamedTuple
from weakref import ReferenceType, ref

import torch

from fp8_dist.dtypes import is_float8
from fp8_dist.torch_internals import base_of, version_of

# Below this size torch's own conversion is faster than several passes.
FEW = 4096  # elements


class _Format(NamedTuple):
    shift: int  # moves the 7 bits of a float8 number to their place in a bf16 number
    exponent: int  # log2 of the factor that is then missing: 127 minus the format's exponent bias
    last_finite: int  # the 7 bits of the largest finite number


_FORMATS = {
    torch.float8_e4m3fn: _Format(shift=4, exponent=120, last_finite=0x7E),
    torch.float8_e5m2: _Format(shift=5, exponent=112, last_finite=0x7B),
}


def upcast(qdata: torch.Tensor, dtype: torch.dtype, is_finite: bool = False) -> torch.Tensor:
    """Return the values of ``qdata.to(dtype)``: float8 data of any shape as bf16, fp32 or fp64.

    ``is_finite`` says that all values are known to be finite.
    """
    if qdata.dtype is dtype:
        return qdata
    if qdata.numel() < FEW:
        # bfloat16() costs less than to(), and is the most frequent call.
        return qdata.bfloat16() if dtype is torch.bfloat16 else qdata.to(dtype)
    known = _FORMATS.get(qdata.dtype)
    if known is None or _flushes() or not (is_finite or _is_finite(qdata, known.last_finite)):
        # Through bf16 here too, so that both paths give a NaN the same bits.
        return qdata.bfloat16().to(dtype)
    # int8 to int16 repeats the sign in all upper bits, so it is in bit 15 already. A product is
    # faster than a shift.
    bits = qdata.view(torch.int8).to(torch.int16).mul_(1 << known.shift)
    bits.bitwise_and_((0x7F << known.shift) - 0x8000)
    return bits.view(torch.bfloat16).mul_(2.0**known.exponent).to(dtype)


def _is_finite(qdata: torch.Tensor, last: int) -> bool:
    """Whether no code of either sign lies beyond the last finite one."""
    if qdata.ndim == 2 and not qdata.is_contiguous():
        qdata = qdata.t()  # max would make a copy
    # The codes of positive values are the largest as signed numbers, the others as unsigned ones.
    largest = qdata.view(torch.int8).max().item(), qdata.view(torch.uint8).max().item()
    return largest[0] <= last and largest[1] <= 0x80 + last


def _flushes(tiny: float = 5e-324) -> bool:
    """Whether this thread treats subnormal numbers as zero, in Python as in torch."""
    return tiny * 1.0 == 0.0


class _Entry(NamedTuple):
    """A matrix, identified by the tensor that it is a view of, with its bf16 copy."""

    root: ReferenceType[torch.Tensor]  # only compared: autograd may be the only owner
    version: int | None
    address: int
    shape: torch.Size
    copy: torch.Tensor


class UpcastCache:
    """A cache of one entry, dropped when its matrix is freed or before another takes its place."""

    def __init__(self) -> None:
        self._entry: _Entry | None = None

    def upcast(self, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """:func:`upcast` of a matrix. The result may be shared and must not be written to."""
        # A matrix and its transpose are stored as one contiguous matrix.
        transposed = not data.is_contiguous()
        stored = data.t() if transposed else data
        if data.numel() < FEW or not (
            is_float8(data.dtype) and version_of(data) is not None and stored.is_contiguous()
        ):
            return upcast(data, dtype)
        copy = self._copy(stored)
        return (copy.t() if transposed else copy).to(dtype)

    def _copy(self, stored: torch.Tensor) -> torch.Tensor:
        root = base_of(stored)
        key = (version_of(stored), stored.data_ptr(), stored.shape)
        entry = self._entry  # read once, because another thread may replace it
        if entry is not None and entry.root() is root and entry[1:4] == key:
            return entry.copy
        entry = self._entry = None  # free the old copy before making another
        copy = upcast(stored, torch.bfloat16)
        self._entry = _Entry(ref(root, self._forget), *key, copy)
        return copy

    def _forget(self, gone: ReferenceType[torch.Tensor]) -> None:
        entry = self._entry
        if entry is not None and entry.root is gone:
            self._entry = None
