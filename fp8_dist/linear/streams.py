"""Tensors that are read on another stream than the one they were made on."""

from collections.abc import Iterable

import torch


def keep_for_current_stream(tensors: Iterable[torch.Tensor]) -> None:
    """The current stream reads them: if they are freed, their memory is reused only after that.

    The caching allocator would give it to the stream that it was allocated on at once.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
