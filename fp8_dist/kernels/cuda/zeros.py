"""Zeros for kernels to reduce into: in eager code one fill serves many."""

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
    """A 0-dim fp32 zero of its own, for a kernel on the current stream.

    In functions that are :func:`pooled` one launch fills 256 of them.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if not _zeros.pooled or device.type != "cuda" or capturing:
        return torch.zeros((), dtype=torch.float32, device=device)
    left = _zeros.left.setdefault((device, torch.cuda.current_stream(device)), [])
    if not left:
        with torch.inference_mode(False):
            left += torch.zeros(256, dtype=torch.float32, device=device).unbind()
    return left.pop()


def pooled(run: Callable[P, R]) -> Callable[P, R]:
    """The function for eager code, which may keep state.

    Graphs call the other: they assume results to be aligned, and may own the memory.
    """

    @wraps(run)
    def with_pool(*args: P.args, **kwargs: P.kwargs) -> R:
        before, _zeros.pooled = _zeros.pooled, True
        try:
            return run(*args, **kwargs)
        finally:
            _zeros.pooled = before

    return with_pool
