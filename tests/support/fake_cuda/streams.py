"""Simulated CUDA streams and events, to find out which operators are ordered.

Each stream counts its operators, and has a vector clock: for every stream, the number of the last
operator that it has waited for. Waiting for an event (or a stream) merges clocks.

A stream that waits for an event of a capture joins the capture. As CUDA does, waiting raises an
error if the event is of another capture, or if a stream in a capture waits for an event that was
recorded outside of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

Clock = dict[int, int]  # number of operators by the id of a stream


class Stream(torch.Stream):
    """A replacement of ``torch.cuda.Stream``; each call makes a new stream."""

    def __new__(cls, device: Any = None, priority: int = 0, name: str = "") -> "Stream":
        return super().__new__(cls, device="cuda:0")

    def __init__(self, device: Any = None, priority: int = 0, name: str = "") -> None:
        self.clock: Clock = {}
        self.name = name or f"stream {self.stream_id}"
        self.capture: Capture | None = None
        _streams.add(self)

    def tick(self) -> int:
        """Count an operator on this stream, and return its number."""
        self.clock[self.stream_id] = number = self.clock.get(self.stream_id, 0) + 1
        return number

    def knows(self, stream_id: int, number: int) -> bool:
        """Whether this stream has waited for an operator of another stream."""
        return self.clock.get(stream_id, 0) >= number

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: "Event") -> None:
        if not event.is_recorded:
            return
        if event.capture is not self.capture:
            if event.capture is None or event.capture.has_ended or self.capture is not None:
                raise RuntimeError(f"{self.name} waits for an event of another capture, or of none")
            event.capture.join(self)
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
        self.capture: Capture | None = None
        self.is_recorded = False

    def record(self, stream: Stream | None = None) -> "Event":
        stream = stream or current_stream()
        self.clock, self.capture, self.is_recorded = dict(stream.clock), stream.capture, True
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing; see :meth:`Stream.synchronize`."""


class Capture:
    """A capture of a CUDA graph, which begins on a stream."""

    def __init__(self, stream: Stream) -> None:
        self.streams: list[Stream] = []
        self.has_ended = False
        self.join(stream)

    def join(self, stream: Stream) -> None:
        stream.capture = self
        self.streams.append(stream)

    def end(self) -> None:
        """End the capture; raise RuntimeError if its stream has not waited for another one."""
        self.has_ended = True
        self.clock = dict(self.streams[0].clock)
        for stream in self.streams:
            stream.capture = None
            if self.clock.get(stream.stream_id, 0) < stream.clock.get(stream.stream_id, 0):
                raise RuntimeError(f"the capture ended before it waited for {stream.name}")


class Graph:
    """A replacement of ``torch.cuda.CUDAGraph``.

    The operators of a capture run when they are captured, and the current stream waits for them in
    each replay.
    """

    def __new__(cls, keep_graph: bool = False) -> "Graph":
        return super().__new__(cls)

    def __init__(self, keep_graph: bool = False) -> None:
        pass

    def capture_begin(self, *_: Any, **__: Any) -> None:
        if current_stream() is default_stream():
            raise RuntimeError("a capture can't begin on the default stream")
        self.capture = Capture(current_stream())

    def capture_end(self) -> None:
        self.capture_end_pre()

    def capture_end_pre(self) -> None:
        self.capture.end()

    def replay(self) -> None:
        current_stream().merge(self.capture.clock)


def is_current_stream_capturing() -> bool:
    """A replacement of ``torch.cuda.is_current_stream_capturing``."""
    return current_stream().capture is not None


def synchronize(device: Any = None) -> None:
    """A replacement of ``torch.cuda.synchronize``: later operators run after all earlier ones."""
    for stream in _streams:
        for other in _streams:
            stream.merge(other.clock)


_stack: list[Stream] = []
_streams: WeakSet[Stream] = WeakSet()


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
    current = current_stream()  # which makes the default stream, the first one
    _stack.append(chosen or current)
    try:
        yield
    finally:
        _stack.pop()
