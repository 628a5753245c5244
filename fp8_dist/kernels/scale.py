"""The amax, and the formula that computes a scale from it.

``fp8_max`` is the largest finite value of the target dtype::

    m     = float32(float64(fp8_max) / max(float64(amax), 1e-12))
    m     = exp2(floor(log2(m)))                  # round_scales_to_power_of_2
    qdata = saturate(float32(x) * m)
    scale = 1 / m                                 # fp32, dequantization: x ~= qdata * scale

For a non-finite amax, ``m`` is 0 or NaN and the scale is inf or NaN. Every value that the scale
covers then dequantizes to NaN (``0 * inf``), so a NaN on one rank becomes visible on all ranks.

The epsilon and the rounding are torchao's, so that its scales are reproduced bit for bit. All
portable code takes multipliers from :func:`scaling_from_amax`. Three fast paths repeat the formula:
Triton kernels compute the scale in registers (``cuda/triton/rounding.py``), or only its exponent
when they cast float8 values again (``cuda/triton/blocks.py``); on CPUs a single scale is computed
as a Python number (``cpu.py``).
"""

from collections.abc import Sequence

import torch

from fp8_dist.kernels.custom_op import custom_op

EPS = 1e-12

# Integer dtypes of the size of floats, by itemsize. Without the sign bit, the bits of floats are
# ordered like their absolute values, with NaN above all others.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The quantization multiplier and the scale, fp32, of the same shape.
Scaling = tuple[torch.Tensor, torch.Tensor]


def empty_amax(x: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    """Allocate the result of :func:`amax`, uninitialized."""
    shape = [] if dims is None else [1 if d in dims else n for d, n in enumerate(x.shape)]
    return x.new_empty(shape, dtype=torch.float32)


@custom_op(fake=empty_amax)
def amax(x: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    """Compute the maximum of the absolute values of a local tensor, fp32.

    It is NaN if a value is NaN.

    Args:
        x: any shape, floating point. The amax of no elements is 0.
        dims: dims to reduce, which keep size 1. ``None`` reduces all dims to a 0-dim tensor.
    """
    if x.numel() == 0:
        return empty_amax(x, dims).zero_()
    if dims is None:
        low, high = torch.aminmax(x)
        # torch.maximum keeps a NaN; Python's max may not.
        largest = torch.maximum(low.neg(), high)
    else:
        largest = torch.amax(x.abs(), tuple(dims), keepdim=True) if dims else x
    # abs clears the sign of a NaN and of -0.0, so that the bits of amaxes, read as integers, are
    # ordered like their values (fp8_dist.mesh.amax).
    return largest.to(torch.float32).abs()


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Return integers that are ordered like the absolute values of floats, NaN last."""
    integer = INTEGERS[x.itemsize]
    return x.view(integer).bitwise_and(torch.iinfo(integer).max)


def fusible_amax(x: torch.Tensor) -> torch.Tensor:
    """Compute :func:`amax` of a tensor that is not empty, with operators that Inductor fuses.

    Inductor can find the amaxes of rows in the kernel that writes ``x``. If ``x`` is a parameter,
    an input of the graph, no kernel writes it, and a single reduction launches fewer kernels. The
    bits are those of :func:`amax`, because Inductor rounds a value to the dtype of ``x`` before it
    views it as an integer.
    """
    largest = magnitudes(x)
    largest = largest.amax() if isinstance(x, torch.nn.Parameter) else largest.amax(-1).amax()
    return largest.view(x.dtype).to(torch.float32)


def covered_dims(covers: str, ndim: int) -> tuple[int, ...] | None:
    """Return the dims that a scale covers; ``None`` for all.

    ``covers``: "tensor", "matrix" (the last two dims), "row" or "column".
    """
    if covers == "tensor":
        return None
    if covers == "matrix":
        return (ndim - 2, ndim - 1)
    return (ndim - 1,) if covers == "row" else tuple(range(ndim - 1))


@custom_op("amaxes(Tensor x, str[] covers) -> Tensor[]")
def amaxes(x: torch.Tensor, covers: Sequence[str]) -> list[torch.Tensor]:
    """Compute :func:`amax` over the :func:`covered_dims` of each name in ``covers``."""
    return [amax(x, covered_dims(name, x.ndim)) for name in covers]


@custom_op()
def amax_of_tensors(
    first: torch.Tensor, others: Sequence[torch.Tensor], by_row: bool = False
) -> torch.Tensor:
    """Compute :func:`amax` for each of many local tensors on one device.

    The result is fp32, ``[1 + len(others)]``.

    Args:
        by_row: compute one amax per row (along the last dim) instead. The result is flat. The rows
            of each tensor follow those of the tensor before.
    """
    tensors = (first, *others)
    if not by_row:
        return torch.stack([amax(x) for x in tensors])
    return torch.cat([amax(x, (x.ndim - 1,)).reshape(-1) for x in tensors])


@custom_op(fake=lambda amax, *_: (torch.empty_like(amax), torch.empty_like(amax)))
def scaling_from_amax(
    amax: torch.Tensor, dtype: torch.dtype, round_scales_to_power_of_2: bool = False
) -> Scaling:
    """Compute the quantization multiplier ``m`` and the dequantization scale.

    The formula is in the docstring of this module. ``amax`` is fp32, of any shape, with one element
    per scale. Both results have its shape and dtype.
    """
    m = (torch.finfo(dtype).max / amax.to(torch.float64).clamp(min=EPS)).to(torch.float32)
    if round_scales_to_power_of_2:
        m = torch.exp2(torch.floor(torch.log2(m)))
    return m, torch.reciprocal(m)
