"""Zeros for kernels to reduce into: one fill serves many."""

import threading
from collections.abc import Callable, Hashable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class _Zeros(threading.local):
    """Zeros that a thread hands out one by one, by device and stream."""

    def __init__(self) -> None:
        self.left: dict[Hashable, list[torch.Tensor]] = {}
        self.pooled = False


_zeros = _Zeros()


def zero(device: torch.device) -> torch.Tensor:
    """A 0-dim fp32 zero of its own, aligned to 16 bytes, for a kernel on the current stream.

    One launch fills 256 of them, in functions that are :func:`pooled` and on the default stream.
    (Inductor warms up and captures its CUDA graphs on another stream, in memory that must hold
    nothing else.)
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros((), dtype=torch.float32, device=device)
    stream = torch.cuda.current_stream(device)
    if not _zeros.pooled and stream != torch.cuda.default_stream(device):
        return torch.zeros((), dtype=torch.float32, device=device)
    left = _zeros.left.setdefault((device, stream.stream_id), [])
    if not left:
        with torch.inference_mode(False):
            # Graphs assume that what they are given is aligned.
            left += torch.zeros(256, 4, dtype=torch.float32, device=device)[:, 0].unbind()
    return left.pop()


def pooled(run: Callable[P, R]) -> Callable[P, R]:
    """The function for eager code, which CUDA graphs don't hold, on whatever stream."""

    @wraps(run)
    def with_pool(*args: P.args, **kwargs: P.kwargs) -> R:
        before, _zeros.pooled = _zeros.pooled, True
        try:
            return run(*args, **kwargs)
        finally:
            _zeros.pooled = before

    return with_pool
