"""Run a program with a fake CUDA device that computes nothing, to check that it runs at all.

    python -m fake_cuda.rehearsal -m MODULE ARGS...
    python -m fake_cuda.rehearsal -c CODE

Tensors have no memory (``kernels.cpp``). Launches do nothing, and take a millisecond each by the
device's clock.
"""

import ctypes
import os
import runpy
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor import output_code

from fake_cuda import device, streams
from fake_cuda.inductor import compiled_code_launches_nothing
from fake_cuda.process import built
from fake_cuda.triton_kernels import launch_nothing
from fp8_dist.moe import dispatch
from fp8_dist.moe import layers as experts
from fp8_dist.weight import agreement

_GUARD = "FP8_DIST_REHEARSAL"  # path of the guard, until torch is imported


class _Event(streams.Event):
    def elapsed_time(self, end: Any) -> float:
        return 1.0


class _Profile(nullcontext[None]):
    """A profile without events. (A CPU build can't profile a GPU.)"""

    def __init__(self, activities: Any) -> None:
        super().__init__(self)

    def events(self) -> list[Any]:
        return []


class _Generator(torch.Generator):
    """A CPU generator: the device has none."""

    def __new__(cls, device: Any = None) -> "_Generator":
        return super().__new__(cls)


def _equal_numbers(sent: torch.Tensor, received: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Read the numbers of rows as if all experts had equal numbers, but for the first."""
    known = torch.full(sent.shape, len(ids) // sent.numel())
    known[0, 0] += len(ids) % sent.numel()
    return dispatch.numbers_of_rows.portable(known, known, ids)


def main(argv: list[str]) -> None:
    """Restart with the guard preloaded, then run the program."""
    guard = os.environ.pop(_GUARD, None)
    if guard is None:
        guard = str(built("guard.cpp"))
        os.environ |= {_GUARD: guard, "LD_PRELOAD": guard}
        os.environ.pop("TRITON_INTERPRET", None)
        os.execv(sys.executable, [sys.executable, "-m", __spec__.name, *argv])
    os.environ.pop("LD_PRELOAD", None)  # not for processes that the program starts
    ctypes.CDLL(guard).take_over()
    torch.set_num_threads(1)
    device._WITH_KERNELS = ()  # composite implementations run, on kernels of kernels.cpp
    device.pretend()
    ctypes.CDLL(str(built("kernels.cpp")))
    launch_nothing()
    answers: dict[str, Any] = {
        "Event": _Event,
        "_sleep": lambda cycles: None,
        "max_memory_allocated": lambda device=None: 10**9,
        "reset_peak_memory_stats": lambda device=None: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    # Don't capture compiled code in CUDA graphs.
    torch._C._cuda_cudaCachingAllocator_is_enabled = lambda: True  # type: ignore[attr-defined]
    for name in ("cudagraph_post_compile", "cudagraph_partition_post_compile"):
        setattr(output_code, name, lambda *args, **options: None)
    guards: Any = torch._C._dynamo.guards
    guards._empty_strided_cpu_pinned = guards._empty_strided_cpu
    # The host can't read values.
    experts.sizes_of_groups = lambda offs, rows: torch.full((len(offs),), rows // len(offs))
    dispatch.numbers_of_rows.register("cuda", _equal_numbers)
    equal, item = torch.equal, torch.Tensor.item
    torch.equal = lambda a, b: a.is_cuda or equal(a, b)
    torch.Tensor.item = lambda x: 1.0 if x.is_cuda else item(x)  # type: ignore[method-assign]
    agreement.first_difference = lambda *args: None
    # FSDP2 frees storages and allocates them again.
    resize = torch.UntypedStorage.resize_
    torch.UntypedStorage.resize_ = (  # type: ignore[method-assign]
        lambda storage, size: storage if storage.is_cuda else resize(storage, size)
    )
    torch.Tensor.record_stream = lambda x, stream: None  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda x, device=None: x  # type: ignore[method-assign]
    reduce = torch.Tensor.scatter_reduce_  # kernels.cpp does not support its string argument
    torch.Tensor.scatter_reduce_ = (  # type: ignore[method-assign]
        lambda x, *args, **options: x if x.is_cuda else reduce(x, *args, **options)
    )
    randn = torch.randn
    torch.Generator = _Generator  # type: ignore[misc]
    torch.randn = lambda *size, generator=None, **options: randn(*size, **options)
    # A CPU build lacks NCCL. All ranks are like this one.
    join = dist.init_process_group
    dist.init_process_group = lambda backend=None, **options: join(
        "fake" if backend == "nccl" else backend, **options
    )
    dist.all_gather_object = lambda values, value, group=None: values.__setitem__(
        slice(None), [value] * len(values)
    )
    torch.profiler.profile = _Profile  # type: ignore[misc,assignment]
    kind, program, *arguments = argv
    sys.argv = [program, *arguments]
    try:
        with compiled_code_launches_nothing():
            if kind == "-c":
                exec(program, {"__name__": "__main__"})
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        _end(end.code if isinstance(end.code, int) else int(end.code is not None))
    _end(0)


def _end(status: int) -> None:
    """End at once, because autograd's thread for the device never ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
