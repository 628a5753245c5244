"""Devices: the float8 dtypes that they have, their streams, and captures of CUDA graphs.

docs/design.md defines the terms of the package (amax, scale, qdata, axis, dim).
"""

import itertools
from collections.abc import Callable, Hashable
from functools import cache, wraps
from importlib import import_module
from typing import Any

import torch

from fp8_dist.torch_internals import constant_in_graphs

FLOAT8_DTYPES: tuple[torch.dtype, ...] = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)


@cache
def rocm_arch() -> str:
    """The AMD architecture of the first device ("gfx942"), or "" where there is none."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0]


def _reads_fnuz() -> bool:
    # MI300-class matrix cores only support the fnuz encodings.
    return rocm_arch() in ("gfx940", "gfx941", "gfx942")


def e4m3() -> torch.dtype:
    """The e4m3 dtype that this machine multiplies, the default for inputs and weights."""
    return torch.float8_e4m3fnuz if _reads_fnuz() else torch.float8_e4m3fn


def e5m2() -> torch.dtype:
    """The e5m2 dtype that this machine multiplies, the default for output gradients."""
    return torch.float8_e5m2fnuz if _reads_fnuz() else torch.float8_e5m2


def is_float8(dtype: torch.dtype) -> bool:
    """Return whether a dtype is one of ``FLOAT8_DTYPES``, to which this package casts."""
    return dtype in FLOAT8_DTYPES


def autocast(x: torch.Tensor) -> torch.Tensor:
    """Cast a floating-point tensor to the autocast dtype if autocast is on; fp64 stays fp64."""
    device = x.device.type
    if device == "meta" or x.dtype is torch.float64 or not torch.is_autocast_enabled(device):
        return x  # torch raises for autocast of the meta device
    return x.to(torch.get_autocast_dtype(device))


def short_name(dtype: torch.dtype) -> str:
    """Name of a dtype without the prefixes ``torch.`` and ``float8_``: ``"e4m3fn"``."""
    return str(dtype).removeprefix("torch.").removeprefix("float8_")


def _nvidia_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU that is here; (0, 0) for other devices."""
    is_nvidias = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if is_nvidias else (0, 0)


def is_as_measured(device: torch.device) -> bool:
    """Return whether a GPU (for "meta", the one in use) is one of docs/gpu.md, or a faster B200."""
    if device.type == "meta" and torch.cuda.is_initialized():
        device = torch.device("cuda")
    return _nvidia_capability(device)[0] in (9, 10)


def architecture(device: torch.device) -> str:
    """The compute capability of an NVIDIA GPU ("9.0"), AMD's name ("gfx942"); "" for others."""
    if device.type != "cuda":
        return ""
    return rocm_arch() or "{}.{}".format(*_nvidia_capability(device))


@constant_in_graphs
def rounds_to(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a device has an instruction that rounds fp32 to a float8 dtype as torch does.

    NVIDIA GPUs have one from compute capability 9.0 (Hopper). Ada's does not count: it
    takes fp16, to which Triton truncates fp32. AMD's do not either, because their formats and
    rounding differ between generations.
    """
    is_ocp = dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    return is_ocp and _nvidia_capability(device) >= (9, 0)


@constant_in_graphs
def stores_transposed(device: torch.device) -> bool:
    """Return whether one kernel of Inductor may store both a float8 copy and its transpose.

    ptxas before release 13 mixes up their bytes: see Note [Four bytes at a time] in
    :mod:`fp8_dist.kernels.cuda.triton.rounding`. Triton uses such a ptxas up to Triton 3.8 on
    Hopper, and up to 3.6 on Blackwell. The result is False if the release of ptxas is not known.
    """
    if device.type != "cuda":
        return True  # ptxas is not used
    major, minor = torch.cuda.get_device_capability(device)
    return _ptxas_release(10 * major + minor) >= 13


@cache
def _ptxas_release(arch: int) -> int:
    """The major release of the ptxas with which Triton compiles; 0 if it is not known."""
    try:
        compiler = import_module("triton.backends.nvidia.compiler")
        return int(compiler.get_ptxas(arch).version.partition(".")[0])
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        return 0


def fuses_casts(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a device where one pass can cast several copies."""
    return tensor.is_cuda


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream on which this thread queues work for a device; None on devices without streams."""
    has_none = device.type in ("cpu", "meta")
    return None if has_none else torch.accelerator.current_stream(device)


_numbers = itertools.count(1)
# The number of the capture that is under way (0: none), and what replays of its graph call.
_capture: tuple[int, dict[Hashable, Callable[[], None]]] = 0, {}


def current_capture() -> int:
    """Return the number of the capture of a CUDA graph that the current stream is in; 0 if none.

    A capture that is not one of ``torch.cuda.CUDAGraph`` gets a new number in each call, so that
    nothing is taken for a part of it.
    """
    is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return (_capture[0] or next(_numbers)) if is_captured else 0


def call_at_replays(key: Hashable, function: Callable[[], None]) -> None:
    """While a graph is captured, let each of its replays call a function; one per key."""
    if _capture[0]:
        _capture[1][key] = function


# From torch 2.14 on, capture_end consists of two methods, which other code may call by themselves.
# The first one ends the capture. (torch's own hooks run in capture_end alone.)
END_OF_CAPTURE = "capture_end"
if hasattr(torch.cuda.CUDAGraph, "capture_end_pre"):
    END_OF_CAPTURE = "capture_end_pre"


def with_numbers(graph: Any) -> tuple[Callable[..., None], ...]:
    """The methods of a class of CUDA graphs that begin and end a capture, and replay it.

    They also number captures, and call what replays are to call.
    """
    # torch does not tell captures apart, and replays write to tensors without any other trace.
    begin, end, run = graph.capture_begin, getattr(graph, END_OF_CAPTURE), graph.replay

    @wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        global _capture
        begin(self, *args, **kwargs)
        _capture = next(_numbers), {}
        self.fp8_dist_calls = _capture[1]

    @wraps(end)
    def capture_end(self: Any) -> None:
        global _capture
        _capture = 0, {}
        end(self)

    @wraps(run)
    def replay(self: Any) -> None:
        run(self)
        for call in getattr(self, "fp8_dist_calls", {}).values():
            call()

    return capture_begin, capture_end, replay


_begin, _end, _replay = with_numbers(torch.cuda.CUDAGraph)
torch.cuda.CUDAGraph.capture_begin = _begin  # type: ignore[method-assign]
if END_OF_CAPTURE == "capture_end":
    torch.cuda.CUDAGraph.capture_end = _end  # type: ignore[method-assign]
else:
    torch.cuda.CUDAGraph.capture_end_pre = _end  # type: ignore[attr-defined]
torch.cuda.CUDAGraph.replay = _replay  # type: ignore[method-assign]


def keep_for(stream: torch.cuda.Stream, tensor: torch.Tensor) -> None:
    """Keep the memory of a tensor from being reused, once freed, until a stream has read it.

    The caching allocator would otherwise reuse it at once on the stream that allocated it.
    """
    if tensor.is_cuda:
        tensor.record_stream(stream)
