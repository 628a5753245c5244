"""Numbers of many weights as one vector."""

from collections.abc import Sequence

import torch

from fp8_dist.torch_internals import storage_address


def joined(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.cat`` of contiguous 1-D tensors, but no copy of those that are adjacent in memory.

    The parts of a tensor that was split are. The result may share their memory.
    """
    first = vectors[0]
    storage, end = storage_address(first), first.storage_offset()
    for vector in vectors:
        if storage_address(vector) != storage or vector.storage_offset() != end:
            return torch.cat(list(vectors))
        end += vector.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))
