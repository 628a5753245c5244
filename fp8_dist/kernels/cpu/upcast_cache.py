"""Cache of the bf16 copy of the last left operand, for consecutive GEMMs that share it.

Layers that share an input multiply it in turn. Each output gradient is multiplied twice, as it is
for grad_input and transposed for grad_weight. The float8 data is then upcast once.
"""

from typing import NamedTuple
from weakref import ReferenceType, ref

import torch

from fp8_dist.dtypes import is_float8
from fp8_dist.kernels.cpu.upcast import FEW, upcast
from fp8_dist.torch_internals import base_of, version_of


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
