"""torch.cuda's functions for the fake device, and fake tensors on it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from captures import number
from torch._dynamo.device_interface import CudaInterface
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fake_cuda import streams
from fake_cuda.triton_kernels import intercept_launches
from fp8_dist import gemm_table, torch_internals
from fp8_dist.kernels.cuda.triton.launch import float8_constants
from fp8_dist.scaling import dense
from scripts.plan.world import HostValues

# The properties of an H200 that libraries read.
_PROPERTIES = SimpleNamespace(
    name="fake CUDA device",
    type="cuda",
    index=0,
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=141 * 10**9,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)


# Operators with both a CUDA kernel and a composite implementation. A CPU build would use the
# latter.
_WITH_KERNELS = ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward")
_ATEN = torch.library.Library("aten", "IMPL")


class _Device(nullcontext[None]):
    """A replacement of ``torch.cuda.device``; the only device is always current."""


def pretend() -> None:
    """Patch torch.cuda permanently, for a device of compute capability 9.0."""
    answers: dict[str, Any] = {
        "current_device": lambda: 0,
        "device": _Device,
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_device_capability": lambda device=None: (_PROPERTIES.major, _PROPERTIES.minor),
        "get_device_name": lambda device=None: _PROPERTIES.name,
        "get_device_properties": lambda device=None: _PROPERTIES,
        "get_rng_state": lambda device=None: torch.empty(0, dtype=torch.uint8),
        "is_available": lambda: True,
        "is_current_stream_capturing": streams.is_current_stream_capturing,
        "is_initialized": lambda: True,
        "mem_get_info": lambda device=None: (_PROPERTIES.total_memory, _PROPERTIES.total_memory),
        "memory_reserved": lambda device=None: 0,
        "manual_seed_all": lambda seed: None,
        "set_device": lambda device: None,
        "set_rng_state": lambda state, device=None: None,
        "synchronize": streams.synchronize,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "Event": streams.Event,
        "Stream": streams.Stream,
        "_DeviceGuard": _Device,
        "stream": streams.stream,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        if hasattr(CudaInterface, name):  # used by compilers
            setattr(
                CudaInterface, name, answer if isinstance(answer, type) else staticmethod(answer)
            )
    graph: Any = streams.Graph
    number(graph)
    torch.cuda.CUDAGraph = graph  # type: ignore[misc]
    torch._C._host_emptyCache = lambda: None  # type: ignore[attr-defined]
    dense.stores_transposed = lambda device: True  # (Otherwise this depends on Triton's ptxas.)
    gemm_table.cuda_release = lambda: (13, 0)
    # (A separate function, because dynamo has both in a table.)
    torch.accelerator.current_stream = lambda device=None: streams.current_stream()
    for name in _WITH_KERNELS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            _ATEN.impl(name, _never_called, "CUDA")
    # This would create a real tensor on the device.
    fake_tensor.init_gpu_context = lambda device: None
    intercept_launches()


@contextmanager
def capability(major: int, minor: int) -> Iterator[None]:
    """Let the device have another compute capability."""
    with patch.multiple(_PROPERTIES, major=major, minor=minor):
        _forget()
        yield
    _forget()


def _forget() -> None:
    """Drop what the library has found out about the device."""
    gemm_table._has_gemm.cache_clear()
    float8_constants.cache_clear()


def _never_called(*args: Any) -> None:
    raise NotImplementedError("tensors on the fake CUDA device are fake")


class FakeCudaMode(FakeTensorMode):
    """A mode for fake tensors on the device."""

    # torch.tensor(..., device="cuda") then makes a CPU tensor, which is copied.
    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)


@contextmanager
def fake_tensors(mode: FakeCudaMode | None = None) -> Iterator[None]:
    """Make tensors fake, and let the library treat them as plain tensors, even under modes.

    So it calls its own operators without the dispatcher, as in eager code without modes. (Graphs
    can't be compiled here.)

    mode: the mode of existing fake tensors.
    """
    plain = (*torch_internals._PLAIN, FakeTensor)
    mode = mode or FakeCudaMode()
    with (
        patch.object(torch_internals, "_PLAIN", plain),
        patch.object(torch_internals, "_len_torch_dispatch_stack", lambda: 0),
        mode,
        _ValuesOnHost(),
    ):
        yield


class _ValuesOnHost(HostValues):
    """Tensors on the CPU have values; tensors that are made on the device have none."""

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._pin_memory.default:
            return args[0]  # fake tensors can't be pinned
        if func is torch.ops.aten.record_stream.default:
            return None  # fake tensors don't support it
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 1  # an arbitrary value
        device = (kwargs or {}).get("device")
        if device is not None and torch.device(device).type == "cuda":
            return func(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)
