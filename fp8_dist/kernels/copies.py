"""Several float8 copies of one local tensor, from one pass over it.

The GEMMs that read a tensor may need copies with different scales (per row, per column) or memory
layouts: a GEMM that contracts the rows of a matrix reads it transposed. A *transposed* copy of
``[..., K]`` is the contiguous matrix ``[K, M]``, with M the product of the other sizes.

Two lists specify the copies: ``of[i]`` is the index of the multiplier (or amax) of copy i, and
``transposed[i]`` is its layout.
"""

import math
from collections.abc import Sequence

import torch

from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.kernels.quantization import quantize
from fp8_dist.kernels.scale import amax, amax_fake, scaling_from_amax
from fp8_dist.kernels.transposing import transposed_copy

Tensors = list[torch.Tensor]


def covered_dims(covers: str, ndim: int) -> tuple[int, ...] | None:
    """Dims that a scale of a "tensor", a "row" or a "column" covers; ``None`` for all dims."""
    if covers == "tensor":
        return None
    return (ndim - 1,) if covers == "row" else tuple(range(ndim - 1))


@custom_op("amaxes(Tensor x, str[] covers) -> Tensor[]")
def amaxes(x: torch.Tensor, covers: Sequence[str]) -> Tensors:
    """:func:`fp8_dist.kernels.amax` over the :func:`covered_dims` of each name in ``covers``."""
    return [amax(x, covered_dims(name, x.ndim)) for name in covers]


@custom_op(
    "quantize_copies(Tensor x, Tensor[] multipliers, ScalarType dtype, int[] of, "
    "bool[] transposed, *, bool fits=False) -> Tensor[]"
)
def quantize_copies(
    x: torch.Tensor,
    multipliers: Sequence[torch.Tensor],
    dtype: torch.dtype,
    of: Sequence[int],
    transposed: Sequence[bool],
    *,
    fits: bool = False,
) -> Tensors:
    """:func:`fp8_dist.kernels.quantize` for several copies."""
    made: dict[int, torch.Tensor] = {}
    for i in of:
        if i not in made:
            made[i] = quantize(x, multipliers[i], dtype, fits=fits)
    copies = zip(of, transposed, strict=True)
    return [transposed_copy(_as_matrix(made[i])) if turned else made[i] for i, turned in copies]


@custom_op(
    "cast_copies(Tensor x, Tensor[] amaxes, ScalarType dtype, bool round_scales_to_power_of_2, "
    "int[] of, bool[] transposed) -> Tensor[]"
)
def cast_copies(
    x: torch.Tensor,
    amaxes: Sequence[torch.Tensor],
    dtype: torch.dtype,
    round_scales_to_power_of_2: bool,
    of: Sequence[int],
    transposed: Sequence[bool],
) -> Tensors:
    """Return the multiplier and the scale of each amax, flat, followed by the copies.

    No value of ``x`` may exceed the amax that covers it.
    """
    scalings = [scaling_from_amax(each, dtype, round_scales_to_power_of_2) for each in amaxes]
    multipliers = [multiplier for multiplier, _ in scalings]
    copies = quantize_copies(x, multipliers, dtype, of, transposed, fits=True)
    return [*(each for scaling in scalings for each in scaling), *copies]


@custom_op(
    "cast_rows(Tensor x, ScalarType dtype, bool round_scales_to_power_of_2, bool[] transposed) "
    "-> Tensor[]"
)
def cast_rows(
    x: torch.Tensor,
    dtype: torch.dtype,
    round_scales_to_power_of_2: bool,
    transposed: Sequence[bool],
) -> Tensors:
    """:func:`cast_copies` with a scale per row, from the amaxes of the local rows."""
    rows = amax(x, (x.ndim - 1,))
    of = [0] * len(transposed)
    return cast_copies(x, [rows], dtype, round_scales_to_power_of_2, of, transposed)


@custom_op(
    "cast_and_record(Tensor x, Tensor multiplier, Tensor scale, ScalarType dtype, "
    "bool[] transposed, Tensor? recorded) -> Tensor[]"
)
def cast_and_record(
    x: torch.Tensor,
    multiplier: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    transposed: Sequence[bool],
    recorded: torch.Tensor | None,
) -> Tensors:
    """Cast copies with a given scale, and return the amax of ``x`` for a later scale.

    Args:
        recorded: the largest amax so far, fp32, 0-dim; ``None`` if there is none.

    Returns:
        The amax; the scale, which is NaN if the amax is not finite; the larger of ``recorded`` and
        the amax; and the copies. With a NaN scale all values dequantize to NaN, whatever their
        bytes are.
    """
    value = amax(x)
    poison = value * 0  # 0, or NaN
    of = [0] * len(transposed)
    copies = quantize_copies(x, [multiplier + poison], dtype, of, transposed)
    largest = torch.maximum(value if recorded is None else recorded, value)
    return [value, scale + poison, largest, *copies]


@cast_and_record.register_fake
def _cast_and_record_fake(
    x: torch.Tensor,
    multiplier: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    transposed: Sequence[bool],
    recorded: torch.Tensor | None,
) -> Tensors:
    numbers = [x.new_empty((), dtype=torch.float32) for _ in range(3)]
    return [*numbers, *empty_copies(x, dtype, transposed)]


def fuses_rows(x: torch.Tensor) -> bool:
    """Whether :func:`cast_rows` reads the tensor once on this device."""
    return x.is_cuda


def _as_matrix(x: torch.Tensor) -> torch.Tensor:
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@amaxes.register_fake
def _amaxes_fake(x: torch.Tensor, covers: Sequence[str]) -> Tensors:
    return [amax_fake(x, covered_dims(name, x.ndim)) for name in covers]


def empty_copies(x: torch.Tensor, dtype: torch.dtype, transposed: Sequence[bool]) -> Tensors:
    """Uninitialized copies of a local tensor."""
    turned = (x.shape[-1] if x.ndim else 1, math.prod(x.shape[:-1]))
    return [
        torch.empty(turned if each else x.shape, dtype=dtype, device=x.device)
        for each in transposed
    ]


@quantize_copies.register_fake
def _quantize_copies_fake(
    x: torch.Tensor,
    multipliers: Sequence[torch.Tensor],
    dtype: torch.dtype,
    of: Sequence[int],
    transposed: Sequence[bool],
    *,
    fits: bool = False,
) -> Tensors:
    return empty_copies(x, dtype, transposed)


@cast_copies.register_fake
def _cast_copies_fake(
    x: torch.Tensor,
    amaxes: Sequence[torch.Tensor],
    dtype: torch.dtype,
    round_scales_to_power_of_2: bool,
    of: Sequence[int],
    transposed: Sequence[bool],
) -> Tensors:
    scalings = [torch.empty_like(each) for each in amaxes for _ in range(2)]
    return [*scalings, *empty_copies(x, dtype, transposed)]


@cast_rows.register_fake
def _cast_rows_fake(
    x: torch.Tensor,
    dtype: torch.dtype,
    round_scales_to_power_of_2: bool,
    transposed: Sequence[bool],
) -> Tensors:
    scalings = [x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) for _ in range(2)]
    return [*scalings, *empty_copies(x, dtype, transposed)]
