"""Exact and fast conversion of float8 data to a wider type on CPUs.

torch converts float8 to bf16 one element at a time. It is faster to move the sign and the 7 other
bits of a float8 number to their places in a bf16 number. The mantissa is then right, and the
exponent is off by a constant, which one multiplication corrects, also for subnormal numbers. torch
converts data with NaN or inf, and all data if this thread flushes subnormal numbers
(``torch.set_flush_denormal``).

The bf16 copy of the last left operand is kept, because the next GEMM often reads the same operand.
Layers may share an input, and each grad_output is multiplied twice: as it is for grad_input, and
transposed for grad_weight.
"""

from typing import NamedTuple
from weakref import ReferenceType, ref

import torch

from fp8_dist.dtypes import is_float8
from fp8_dist.torch_internals import base_of, version_of

# Below this size torch's own conversion is faster than several passes.
FEW = 4096  # elements


class _Format(NamedTuple):
    shift: int  # from the 7 bits of a float8 number to their place in a bf16 number
    exponent: int  # log2 of the correcting factor: 127 minus the exponent bias of the format
    last_finite: int  # the 7 bits of the largest finite number


_FORMATS = {
    torch.float8_e4m3fn: _Format(shift=4, exponent=120, last_finite=0x7E),
    torch.float8_e5m2: _Format(shift=5, exponent=112, last_finite=0x7B),
}


def upcast(qdata: torch.Tensor, dtype: torch.dtype, is_finite: bool = False) -> torch.Tensor:
    """Convert float8 data of any shape to bf16, fp32 or fp64, as ``qdata.to(dtype)`` does.

    Args:
        is_finite: all values are known to be finite.
    """
    if qdata.dtype is dtype:
        return qdata
    if qdata.numel() < FEW:
        # bfloat16() costs less than to(), and bf16 is the most frequent dtype.
        return qdata.bfloat16() if dtype is torch.bfloat16 else qdata.to(dtype)
    known = _FORMATS.get(qdata.dtype)
    if known is None or _flushes() or not (is_finite or _is_finite(qdata, known.last_finite)):
        # Through bf16, as below, so that both paths give a NaN the same bits.
        return qdata.bfloat16().to(dtype)
    # The conversion from int8 to int16 repeats the sign in all upper bits, so it is already in
    # bit 15. A multiplication is faster than a shift.
    bits = qdata.view(torch.int8).to(torch.int16).mul_(1 << known.shift)
    bits.bitwise_and_((0x7F << known.shift) - 0x8000)
    return bits.view(torch.bfloat16).mul_(2.0**known.exponent).to(dtype)


def _is_finite(qdata: torch.Tensor, last: int) -> bool:
    """Return whether all values are finite, given the byte of the largest finite number."""
    if qdata.ndim == 2 and not qdata.is_contiguous():
        qdata = qdata.t()  # max would make a copy
    # Among signed bytes the positive values are the largest, among unsigned ones the negative ones.
    largest = qdata.view(torch.int8).max().item(), qdata.view(torch.uint8).max().item()
    return largest[0] <= last and largest[1] <= 0x80 + last


def _flushes(tiny: float = 5e-324) -> bool:
    """Return whether this thread flushes subnormal numbers to zero, in Python as in torch."""
    return tiny * 1.0 == 0.0


class _Entry(NamedTuple):
    """Matrix, identified by the tensor that it is a view of, and its bf16 copy."""

    root: ReferenceType[torch.Tensor]  # weak: autograd may be the only owner of the tensor
    version: int | None
    address: int
    shape: torch.Size
    copy: torch.Tensor


class UpcastCache:
    """Cache of one bf16 copy, dropped when its matrix is freed or another matrix is cached."""

    def __init__(self) -> None:
        self._entry: _Entry | None = None

    def upcast(self, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Convert a matrix by :func:`upcast`. Do not write to the result, which may be shared."""
        # A matrix and its transpose share one entry.
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
