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
