"""Devices: whether they multiply float8 data, their streams, and captures of CUDA graphs."""

from collections.abc import Iterable
from functools import cache

import torch


@cache
def rocm_arch() -> str:
    """The AMD architecture of the first device ("gfx942"), or "" where there is none."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0]


@cache
def device_has_float8_gemm(device: torch.device) -> bool:
    """Whether ``torch._scaled_mm`` runs on float8 matrix cores of a device.

    These are NVIDIA GPUs from compute capability 8.9 (Ada, Hopper), and AMD's gfx94x, gfx95x and
    gfx12x. On a CPU the operator is slower than :mod:`fp8_dist.kernels.cpu`.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    if torch.version.hip is not None:
        return rocm_arch().startswith(("gfx94", "gfx95", "gfx12"))
    return torch.cuda.get_device_capability(device) >= (8, 9)


def fuses_casts(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a device that casts several copies in one pass."""
    return tensor.is_cuda


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream on which this thread queues work for a device; None on devices without streams."""
    if device.type in ("cpu", "meta"):
        return None
    return torch.accelerator.current_stream(device)


def is_captured(tensor: torch.Tensor) -> bool:
    """Whether the current computation on a tensor is captured in a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def keep_for_current_stream(tensors: Iterable[torch.Tensor]) -> None:
    """Keep the memory of tensors, once freed, until the current stream has read them.

    The caching allocator would otherwise reuse it at once on the stream that allocated it.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
