"""Captures of CUDA graphs that are pretended, on any device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from fp8_dist import device
from fp8_dist.mesh import local_tensor
from fp8_dist.torch_internals import unnoticed_writes
from fp8_dist.weight.known import KnownWeight


def number(graph: Any) -> None:
    """Let a class of graphs number its captures, as the library lets torch's."""
    begin, end, replay = device.with_numbers(graph)
    graph.capture_begin, graph.replay = begin, replay
    setattr(graph, device.END_OF_CAPTURE, end)


@contextmanager
def captured() -> Iterator[Any]:
    """Let the library believe that a CUDA graph is captured, and yield the graph.

    (What it computes has values, which those of a replay would be.)
    """

    class Graph:
        """A graph that does nothing but what the library adds to torch's."""

        capture_begin = capture_end_pre = replay = lambda self: None

        def capture_end(self) -> None:
            self.capture_end_pre()

    answers = {"is_initialized": lambda: True, "is_current_stream_capturing": lambda: True}
    with patch.multiple(torch.cuda, CUDAGraph=Graph, **answers):
        number(Graph)
        graph = Graph()
        graph.capture_begin()
        try:
            yield graph
        finally:
            graph.capture_end()


@torch.no_grad()
def multiply(model: Any, factor: float) -> None:
    """Multiply weights unnoticed, as a replay does."""
    for parameter in model.parameters():
        plain = KnownWeight.unwrap(local_tensor(parameter))
        with unnoticed_writes(plain):
            plain.mul_(factor)
