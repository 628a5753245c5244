"""Concatenation of the numbers of many weights."""

from collections.abc import Sequence

import torch

from fp8_dist.torch_internals import storage_address


def joined(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate contiguous 1-D tensors, without a copy if they are adjacent in memory.

    The parts of a tensor that was split are adjacent. The result may share their memory.
    """
    first = vectors[0]
    storage, end = storage_address(first), first.storage_offset()
    for vector in vectors:
        if storage_address(vector) != storage or vector.storage_offset() != end:
            return torch.cat(list(vectors))
        end += vector.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))
