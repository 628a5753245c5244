"""Simulated CUDA streams and events, to find out which operators are ordered.

Each stream counts its operators, and has a vector clock: for every stream, the number of the last
operator that it has waited for. Waiting for an event (or a stream) merges clocks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Clock = dict[int, int]  # number of operators by the id of a stream


class Stream(torch.Stream):
    """A replacement of ``torch.cuda.Stream``; each call makes a new stream."""

    def __new__(cls, device: Any = None, priority: int = 0, name: str = "") -> "Stream":
        return super().__new__(cls, device="cuda:0")

    def __init__(self, device: Any = None, priority: int = 0, name: str = "") -> None:
        self.clock: Clock = {}
        self.name = name or f"stream {self.stream_id}"

    def tick(self) -> int:
        """Count an operator on this stream, and return its number."""
        self.clock[self.stream_id] = number = self.clock.get(self.stream_id, 0) + 1
        return number

    def knows(self, stream_id: int, number: int) -> bool:
        """Whether this stream has waited for an operator of another stream."""
        return self.clock.get(stream_id, 0) >= number

    def wait_stream(self, stream: "Stream") -> None:
        self.merge(stream.clock)

    def wait_event(self, event: "Event") -> None:
        self.merge(event.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Do nothing: the host's waiting does not matter in this simulation."""

    def merge(self, clock: Clock) -> None:
        """Make later operators of this stream run after those in another clock."""
        for stream_id, number in clock.items():
            self.clock[stream_id] = max(number, self.clock.get(stream_id, 0))


class Event:
    """A replacement of ``torch.cuda.Event``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> "Event":
        self.clock = dict((stream or current_stream()).clock)
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing; see :meth:`Stream.synchronize`."""


_stack: list[Stream] = []


def default_stream(device: Any = None) -> Stream:
    """A replacement of ``torch.cuda.default_stream``: the compute stream."""
    if not _stack:
        _stack.append(Stream(name="compute"))
    return _stack[0]


def current_stream(device: Any = None) -> Stream:
    """A replacement of ``torch.cuda.current_stream``; by default the compute stream."""
    default_stream()
    return _stack[-1]


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """A replacement of ``torch.cuda.stream``."""
    _stack.append(chosen or current_stream())
    try:
        yield
    finally:
        _stack.pop()
