"""amax, and the one formula from amax to scale.

With ``fp8_max`` the largest finite value of the target dtype::

    m     = float32(float64(fp8_max) / max(float64(amax), 1e-12))
    m     = exp2(floor(log2(m)))                  # round_scales_to_power_of_2
    qdata = saturate(float32(x) * m)
    scale = 1 / m                                 # fp32, dequantization: x ~= qdata * scale

A non-finite amax gives ``m`` of 0 or NaN and a scale of inf or NaN: every value that the scale
covers dequantizes to NaN (``0 * inf``), which is how one NaN on one rank becomes visible on all.

The epsilon and the rounding are torchao's, so that its scales are reproduced bit for bit. All
three steps are custom operators, opaque to compilers: eager, aot_eager and inductor produce the
same bits.
"""

import torch

EPS = 1e-12

_LIB = torch.library.Library("fp8_dist", "FRAGMENT")
for _schema in (
    "amax(Tensor x) -> Tensor",
    "scaling_from_amax(Tensor amax, ScalarType dtype, bool power_of_2) -> (Tensor, Tensor)",
    "quantize(Tensor x, Tensor multiplier, ScalarType dtype) -> Tensor",
):
    _LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def amax(x: torch.Tensor) -> torch.Tensor:
    """Maximum of absolute values of a local tensor.

    Args:
        x: any shape, floating point; an empty tensor has amax 0.

    Returns:
        0-dim fp32 tensor; NaN if ``x`` holds one, inf if ``x`` holds one and no NaN.
    """
    return torch.ops.fp8_dist.amax(x)


def scaling_from_amax(
    amax: torch.Tensor, dtype: torch.dtype, round_scales_to_power_of_2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantization multiplier ``m`` and the dequantization scale of the formula above.

    Args:
        amax: fp32, any shape (one element per scale).
        dtype: the float8 dtype whose largest finite value amax is mapped to.
        round_scales_to_power_of_2: take ``exp2(floor(log2(m)))`` in fp32 for ``m``.

    Returns:
        (multiplier, scale), fp32 tensors of amax's shape.
    """
    return torch.ops.fp8_dist.scaling_from_amax(amax, dtype, round_scales_to_power_of_2)


def quantize(x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``saturate(float32(x) * m)`` as ``dtype``.

    Args:
        x: any shape, floating point, local.
        multiplier: 0-dim fp32.
        dtype: a float8 dtype.

    Returns:
        contiguous tensor of x's shape.
    """
    return torch.ops.fp8_dist.quantize(x, multiplier, dtype)


def _amax(x: torch.Tensor) -> torch.Tensor:
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    # maximum, unlike Python's max, keeps a NaN; abs clears the sign of a NaN and of -0.0, so that
    # the bits of an amax, read as an integer, are ordered like its values (fp8_dist.sharding).
    return torch.maximum(low.neg(), high).to(torch.float32).abs_()


def _scaling_from_amax(
    amax: torch.Tensor, dtype: torch.dtype, power_of_2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    m = (torch.finfo(dtype).max / amax.to(torch.float64).clamp(min=EPS)).to(torch.float32)
    if power_of_2:
        m = torch.exp2(torch.floor(torch.log2(m)))
    return m, torch.reciprocal(m)


def _quantize(x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    # The clamp is needed: casts to e5m2 on CPU do not always saturate.
    scaled = x.contiguous().to(torch.float32) * multiplier
    return scaled.clamp_(-limit, limit).to(dtype)


_LIB.impl("amax", _amax, "CompositeExplicitAutograd")
_LIB.impl("scaling_from_amax", _scaling_from_amax, "CompositeExplicitAutograd")
_LIB.impl("quantize", _quantize, "CompositeExplicitAutograd")


@torch.library.register_fake("fp8_dist::amax", lib=_LIB)
def _amax_fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((), dtype=torch.float32)


@torch.library.register_fake("fp8_dist::scaling_from_amax", lib=_LIB)
def _scaling_from_amax_fake(
    amax: torch.Tensor, dtype: torch.dtype, power_of_2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(amax), torch.empty_like(amax)


@torch.library.register_fake("fp8_dist::quantize", lib=_LIB)
def _quantize_fake(x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)
