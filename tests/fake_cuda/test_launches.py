"""Launches of compiled kernels that were kept: what reaches the driver is what Triton passes."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from compile_kernels import call_all
from fake_cuda.process import FakeCudaProcess, built
from fake_cuda.triton_kernels import _IdleLauncher, launch_nothing
from triton.runtime.jit import JITFunction

from fp8_dist.kernels import CustomOp
from fp8_dist.kernels.cuda.triton import launch

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="torch's CUDA kernels would run where kernels.cpp has none",
)

Launch = tuple[object, ...]


@pytest.fixture(scope="module")
def idle_cuda() -> Iterator[FakeCudaProcess]:
    """A process whose device launches nothing, and can't have fake tensors."""
    with FakeCudaProcess() as process:
        process.run(start)
        yield process


def start() -> None:
    def measure(*args: object) -> Any:
        raise torch.OutOfMemoryError("the first choice of block sizes will do")

    ctypes.CDLL(str(built("kernels.cpp")))
    launch_nothing()
    launch.measure = measure


def launched(run: Callable[[], object]) -> tuple[list[Launch], int]:
    """What reaches the driver: grid, stream, kernel and its arguments; and how often Triton ran."""
    found: list[Launch] = []

    def note(self: Any, *args: Any) -> None:
        found.append(shown(args))

    real = JITFunction.run
    with (
        patch.object(_IdleLauncher, "__call__", note),
        patch.object(JITFunction, "run", autospec=True, side_effect=real) as by_triton,
    ):
        run()
    return found, by_triton.call_count


def shown(arguments: tuple[Any, ...]) -> Launch:
    return tuple(map(_shown, arguments))


def _shown(argument: Any) -> object:
    """A tensor as what is known of one without memory, and the data that profilers get."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, tuple(argument.shape), argument.stride(), argument.storage_offset()
    if type(argument) is tuple:
        return shown(argument)
    return argument.data if hasattr(argument, "data") else argument


def every_operator() -> tuple[list[Launch], list[Launch], int]:
    """What the operators launch with kernels that Triton finds, and with those that are kept."""

    def run(op: CustomOp[..., Any], *args: Any) -> Any:
        return op(*args)

    def step() -> None:
        with torch.device("cuda"):
            call_all(run)

    step()  # chooses block sizes
    by_triton, runs = launched(step)
    assert runs > 40
    return by_triton, *launched(step)


def test_arguments_and_grids_are_those_of_triton(idle_cuda: FakeCudaProcess) -> None:
    by_triton, directly, triton_runs = idle_cuda.run(every_operator)
    assert triton_runs == 0
    assert len(directly) > 40
    assert directly == by_triton
