"""Float8 dtypes, and those that this machine multiplies.

docs/design.md defines the terms of the package (amax, scale, qdata, axis, dim).
"""

import torch

from fp8_dist.device import rocm_arch

FLOAT8_DTYPES: tuple[torch.dtype, ...] = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)


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
    """Whether a dtype is one of ``FLOAT8_DTYPES``, to which this package casts."""
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
<<<<<<< HEAD
=======


@cache
def device_has_float8_gemm(device: torch.device) -> bool:
    """Whether ``torch._scaled_mm`` runs on float8 matrix cores of a device.

    This is the case for NVIDIA GPUs from compute capability 8.9 (Ada, Hopper) and for AMD's gfx94x,
    gfx95x and gfx12x. On a CPU the operator is slower than :mod:`fp8_dist.kernels.cpu.gemm`.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    if torch.version.hip is not None:
        return _rocm_arch().startswith(("gfx94", "gfx95", "gfx12"))
    return torch.cuda.get_device_capability(device) >= (8, 9)
>>>>>>> prose-linear
