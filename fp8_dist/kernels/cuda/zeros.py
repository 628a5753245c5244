"""Zeros for kernels to reduce into, many of them filled at once."""

import threading
from collections.abc import Callable, Hashable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class _Zeros(threading.local):
    """Zeros that a thread has left, by device and stream."""

    def __init__(self) -> None:
        self.left: dict[Hashable, list[torch.Tensor]] = {}
        self.pooled = False


_zeros = _Zeros()


def zero(device: torch.device) -> torch.Tensor:
    """Return a new 0-dim fp32 zero, aligned to 16 bytes, for a kernel on the current stream.

    One launch fills 256 zeros on the default stream, and on any stream in :func:`pooled` functions.
    Elsewhere, and while a CUDA graph is captured, each zero is allocated separately. Inductor warms
    up and captures its CUDA graphs on another stream, in memory that must hold nothing else.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros((), dtype=torch.float32, device=device)
    stream = torch.cuda.current_stream(device)
    if not _zeros.pooled and stream != torch.cuda.default_stream(device):
        return torch.zeros((), dtype=torch.float32, device=device)
    left = _zeros.left.setdefault((device, stream.stream_id), [])
    if not left:
        with torch.inference_mode(False):
            # Graphs assume that their inputs are aligned.
            left += torch.zeros(256, 4, dtype=torch.float32, device=device)[:, 0].unbind()
    return left.pop()


def pooled(run: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function for eager code, outside of CUDA graphs, to use the pool on every stream."""

    @wraps(run)
    def with_pool(*args: P.args, **kwargs: P.kwargs) -> R:
        before, _zeros.pooled = _zeros.pooled, True
        try:
            return run(*args, **kwargs)
        finally:
            _zeros.pooled = before

    return with_pool
