"""Durations of collectives, as torch's profiler records them.

The profiler records when a collective of CPU tensors runs on a thread of its backend, in an event
such as ``gloo:all_reduce``, and when kernels run on a GPU. It connects a kernel to the call that
launched it. It does not connect the events of backends to calls; these are matched in order, by
kind and shape.
"""

import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from fp8_dist.debug.communication.collectives import Collective
from fp8_dist.torch_internals import profiler_is_active

# The name of the range around each call in the trace, followed by the call's position.
_MARK = "comm_audit: collective "
# The name that a backend gives a collective on one of its threads.
_BACKEND_EVENT = re.compile(r"\w+:(\w+)")
_GRACE_S = 0.01
# gloo reduces the whole buffer, and each rank keeps its share.
_RUNS_AS = {"reduce_scatter": {"reduce_scatter", "all_reduce"}}


class _Call(NamedTuple):
    """Properties of a collective that are known when it is issued."""

    op: str
    on_cpu: bool
    shapes: set[tuple[int, ...]]


class CollectiveTimer:
    """Context manager that profiles a block; afterwards ``seconds`` has the durations.

    Attributes:
        seconds: the duration for each call of :meth:`around`, in order; None if it is not known.
    """

    def __init__(self) -> None:
        self.seconds: list[float | None] = []
        self._calls: list[_Call] = []
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities, record_shapes=True)

    def __enter__(self) -> Self:
        if profiler_is_active():
            raise RuntimeError(
                "comm_audit(timings=True) uses torch.profiler, which is already active, and there "
                "can be only one: audit a block outside of it, or leave timings out"
            )
        self._profiler.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if any(call.on_cpu for call in self._calls):
            # gloo ends an event shortly after it wakes the threads that wait for the collective.
            time.sleep(_GRACE_S)
        with record_function(f"{_MARK}end"):
            pass
        self._profiler.stop()
        events = list(self._profiler.events() or [])
        # A GPU's timeline has ranges of the same names.
        on_host = (event for event in events if event.device_type == DeviceType.CPU)
        marks = {event.name: event for event in on_host if event.name.startswith(_MARK)}
        found = [marks.get(f"{_MARK}{i}") for i in range(len(self._calls))]
        calls = list(zip(self._calls, found, strict=True))
        self.seconds = [
            None if mark is None or call.on_cpu else _seconds_of_kernels(mark)
            for call, mark in calls
        ]
        # The profiler gives collectives that are still running an end after all marks.
        end = max((mark.time_range.end for mark in marks.values()), default=0)
        for position, seconds in _seconds_on_cpu(calls, events, end):
            self.seconds[position] = seconds

    def around(self, collective: Collective) -> AbstractContextManager[Any]:
        """Return a context manager for the call that issues a collective."""
        tensors = collective.tensors
        shapes = {tuple(tensor.shape) for tensor in tensors}
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        self._calls.append(_Call(collective.op, on_cpu, shapes))
        return record_function(f"{_MARK}{len(self._calls) - 1}")


def _inside(event: FunctionEvent) -> Iterator[FunctionEvent]:
    for child in event.cpu_children:
        yield child
        yield from _inside(child)


def _seconds_of_kernels(mark: FunctionEvent) -> float | None:
    """Return the total time of the NCCL kernels that a call launched; None if there are none."""
    kernels = [kernel for event in (mark, *_inside(mark)) for kernel in event.kernels]
    # "nccl:all_reduce" is a range around them.
    own = [k for k in kernels if k.name.startswith("nccl") and not k.name.startswith("nccl:")]
    return sum(kernel.duration for kernel in own) / 1e6 if own else None


def _seconds_on_cpu(
    calls: list[tuple[_Call, FunctionEvent | None]], events: list[FunctionEvent], end: float
) -> Iterator[tuple[int, float | None]]:
    """Yield the position and the duration of each call for which an event is found.

    The duration is None if the event ended after ``end``.
    """
    waiting: list[tuple[int, _Call, FunctionEvent]] = []
    for position, (call, mark) in enumerate(calls):
        if call.on_cpu and mark is not None:
            # The backend may send a packed copy of the tensors, of another shape.
            sent = {shape for event in _inside(mark) for shape in _shapes(event)} - {()}
            waiting.append((position, call._replace(shapes=call.shapes | sent), mark))
    for event in sorted(events, key=lambda event: event.time_range.start):
        name = _BACKEND_EVENT.fullmatch(event.name)
        if not event.is_async or name is None:
            continue
        for entry in waiting:
            position, call, mark = entry
            if (
                name[1] in _RUNS_AS.get(call.op, {call.op})
                and _shapes(event) & call.shapes
                and mark.time_range.start <= event.time_range.start
            ):
                waiting.remove(entry)
                ended = event.time_range.end <= end
                yield position, event.time_range.elapsed_us() / 1e6 if ended else None
                break


def _shapes(event: FunctionEvent) -> set[tuple[int, ...]]:
    """Return the shapes of an operator's arguments; () also stands for lists and non-tensors."""
    shapes: Any = event.input_shapes or []
    return {tuple(s) if all(isinstance(n, int) for n in s) else () for s in shapes}
