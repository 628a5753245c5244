"""Tables of many tensors, for kernels that process all of them in one launch.

A table is on the device, with a row of int64 numbers for each tensor. It is copied there once for
the same tensors, since shards of weights keep their addresses. The host waits for the copy.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch

from fp8_dist.device import current_stream, is_captured
from fp8_dist.kernels.cuda.triton.launch import DTYPES
from fp8_dist.kernels.quantization import as_matrix


def are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether one launch can process all of the tensors.

    This is not the case while a CUDA graph is captured, because the graph would outlive the
    addresses.
    """
    dtype = tensors[0].dtype
    alike = all(x.dtype is dtype and x.is_contiguous() for x in tensors)
    return dtype in DTYPES and alike and not is_captured(tensors[0])


def starts_of(sizes: Sequence[int]) -> list[int]:
    """Return the start of each of several consecutive pieces of the given sizes."""
    return list(accumulate(sizes, initial=0))[:-1]


class Table:
    """Matrices of several tensors for which :func:`are_alike` is true.

    Attributes:
        sizes: the number of elements of each matrix.
        rows, columns: the sizes of each matrix.
        starts: the index of the first element of each matrix, if one follows the other.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        matrices = [as_matrix(x) for x in tensors]
        self._device = matrices[0].device
        self._addresses = [x.data_ptr() for x in matrices]
        self.sizes = [x.numel() for x in matrices]
        self.rows = [x.shape[0] for x in matrices]
        self.columns = [x.shape[1] for x in matrices]
        self.starts = starts_of(self.sizes)

    def of(self, *columns: Sequence[int]) -> torch.Tensor:
        """Return the table with the address of each tensor, followed by the given numbers."""
        device = self._device
        rows = tuple(zip(self._addresses, *columns, strict=True))
        return _table_of(rows, device, current_stream(device))

    def is_aligned(self, *columns: Sequence[int]) -> bool:
        """Return whether all addresses and the given numbers are multiples of 16."""
        return all(n % 16 == 0 for each in (self._addresses, *columns) for n in each)


@lru_cache(maxsize=16)
def _table_of(
    rows: tuple[tuple[int, ...], ...], device: torch.device, stream: torch.Stream | None
) -> torch.Tensor:
    # One table per stream, because the memory of a dropped table is reused on its stream only.
    return torch.tensor(rows, dtype=torch.int64).to(device)
