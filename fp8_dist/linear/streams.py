"""Tensors that are read on another stream than the one that they were allocated on."""

from collections.abc import Iterable

import torch


def keep_for_current_stream(tensors: Iterable[torch.Tensor]) -> None:
    """Keep the memory of freed tensors from being reused before the current stream has read them.

    The caching allocator would otherwise reuse it at once on the stream of its allocation.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
