"""Casts of local tensors to float8, by the formula of :mod:`fp8_dist.kernels.scale`.

The GEMMs that read a tensor may need copies with different scales (per row, per column) or in
different memory layouts: a GEMM that contracts the rows of a matrix reads it transposed. A
*transposed* copy of ``[..., K]`` is the contiguous matrix ``[K, P]``. P is the product of the other
sizes, M, rounded up to a multiple of ``ALIGNMENT``. The columns from M on are zeros, which add
nothing to a product.

Two lists specify the copies. ``of[i]`` is the index of the amax that copy i is cast with.
``transposed[i]`` says whether copy i is transposed. No two copies are the same.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.kernels.scale import INTEGERS, Scaling, amax, scaling_from_amax

Tensors = list[Tensor]

ALIGNMENT = 16  # elements; float8 matrix cores load 16-byte vectors


@custom_op()
def quantize(x: Tensor, multiplier: Tensor, dtype: torch.dtype, *, saturate: bool = True) -> Tensor:
    """Cast ``saturate(float32(x) * m)`` to ``dtype``.

    Args:
        x: any shape, floating point, local.
        multiplier: fp32, 0-dim or of size 1 along the dims that it covers.
        dtype: a float8 dtype.
        saturate: clamp products, because values of ``x`` may exceed the amax from which the
            multiplier was computed. If False, none may: then products exceed the largest float8
            number by less than half a step, so the bits are the same without the clamp.

    Returns:
        A contiguous tensor of the shape of ``x``.
    """
    return multiplied(x.contiguous(), multiplier, dtype, saturate).to(dtype)


def multiplied(x: Tensor, multiplier: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    """Compute the fp32 values that :func:`quantize` rounds to ``dtype``."""
    product = x * multiplier if x.dtype is torch.float32 else x.to(torch.float32).mul_(multiplier)
    if not saturate:
        return product
    # Casts to e5m2 on CPU do not always saturate.
    limit = torch.finfo(dtype).max
    return product.clamp_(-limit, limit)


def rounded_up(size: int, multiple: int = ALIGNMENT) -> int:
    """Round a size up to a multiple."""
    return (size + multiple - 1) // multiple * multiple


def padded(x: Tensor, missing: Sequence[int]) -> Tensor:
    """Pad with zeros like torch's ``pad``, float8 data too. Return ``x`` if nothing is missing."""
    if not any(missing):
        return x
    if x.itemsize > 1:
        return torch.nn.functional.pad(x, missing)
    # Pad bytes, because torch does not pad float8 data.
    return torch.nn.functional.pad(x.view(torch.uint8), missing).view(x.dtype)


def empty_copies(x: Tensor, dtype: torch.dtype, transposed: Sequence[bool]) -> Tensors:
    """Allocate the float8 copies of a local tensor, uninitialized."""
    shapes = x.shape, (x.shape[-1] if x.ndim else 1, rounded_up(math.prod(x.shape[:-1])))
    return [x.new_empty(shapes[is_transposed], dtype=dtype) for is_transposed in transposed]


def empty_transposed(x: Tensor, multiple: int = ALIGNMENT) -> Tensor:
    """Allocate the result of :func:`transposed_copy`, uninitialized."""
    *others, rows, columns = x.shape
    return x.new_empty((*others, columns, rounded_up(rows, multiple)))


@custom_op(fake=empty_transposed)
def transposed_copy(x: Tensor, multiple: int = ALIGNMENT) -> Tensor:
    """Copy contiguous matrices ``[..., M, K]`` of 1-byte elements to contiguous transposes.

    Args:
        multiple: the result is padded with columns of zeros to a multiple of this.

    Returns:
        ``[..., K, P]``.
    """
    if not x.shape[-2] % multiple:
        # Not contiguous(), which returns a view if there is one row or none.
        return x.mT.clone(memory_format=torch.contiguous_format)
    out = empty_transposed(x, multiple)
    out[..., : x.shape[-2]].copy_(x.mT)
    out[..., x.shape[-2] :].view(torch.uint8).zero_()
    return out


def as_matrix(x: Tensor) -> Tensor:
    """Flatten ``[..., K]`` to ``[M, K]``, as a view if strides allow it.

    A tensor with fewer than 2 dims becomes one row.
    """
    if x.ndim == 2:
        return x
    return x.flatten(0, -2) if x.ndim > 2 else x.reshape(1, -1)


@custom_op(
    "cast_copies(Tensor x, Tensor[] amaxes, ScalarType dtype, bool round_scales_to_power_of_2, "
    "int[] of, bool[] transposed, *, bool saturate=False) -> Tensor[]"
)
def cast_copies(
    x: Tensor,
    amaxes: Sequence[Tensor],
    dtype: torch.dtype,
    round_scales_to_power_of_2: bool,
    of: Sequence[int],
    transposed: Sequence[bool],
    *,
    saturate: bool = False,
    scaling: Callable[..., Scaling] = scaling_from_amax,
    cast: Callable[..., Tensor] = quantize,
) -> Tensors:
    """Compute scales from amaxes, and cast copies with them.

    Args:
        saturate: values of ``x`` may exceed the amax that covers them.
        scaling: computes :func:`scaling_from_amax`. It is no argument of the operator.
        cast: computes :func:`quantize`. It is no argument of the operator.

    Returns:
        The scale of each amax, followed by the copies.
    """
    multipliers: Tensors = []
    results: Tensors = []
    for value in amaxes:
        multiplier, scale = scaling(value, dtype, round_scales_to_power_of_2)
        multipliers.append(multiplier)
        results.append(scale)

    cast_with: dict[int, Tensor] = {}
    for i, is_transposed in zip(of, transposed, strict=True):
        if i not in cast_with:
            cast_with[i] = cast(x, multipliers[i], dtype, saturate=saturate)
        qdata = cast_with[i]
        results.append(transposed_copy(as_matrix(qdata)) if is_transposed else qdata)
    return results


def fusible_copies(
    x: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    transposed: Sequence[bool],
    *,
    saturate: bool = False,
) -> Tensors:
    """Compute :func:`cast_copies` with one scale for the tensor, by operators that Inductor fuses.

    The number of rows must be a multiple of ``ALIGNMENT`` if a copy is transposed. The bits are
    those of :func:`cast_copies`.
    """
    multiplier, _ = scaling_from_amax.portable(amax, dtype)
    # Inductor's kernels only approximate an fp32 quotient; an fp64 one rounds correctly to fp32.
    scale = multiplier.to(torch.float64).reciprocal().to(torch.float32)
    # Inductor keeps values in fp32 between operators that it fuses, and rounds them to the dtype of
    # the tensor where they are viewed as integers. It removes a view and its inverse unless there
    # is an operator between them.
    wide = x.view(INTEGERS[x.itemsize]).bitwise_and(-1).view(x.dtype).to(torch.float32)
    qdata = multiplied(wide, multiplier, dtype, saturate).to(dtype).contiguous()
    if True not in transposed:
        return [scale, *(qdata for _ in transposed)]
    columns = as_matrix(qdata).t().contiguous()
    # AOTAutograd would cast a parameter again in the backward unless the forward uses the
    # transposed copy, so make it do so. For an activation it saves what takes the least memory.
    rows = columns.t().contiguous() if isinstance(x, torch.nn.Parameter) else qdata
    return [scale, *(columns if is_transposed else rows for is_transposed in transposed)]


@custom_op()
def cast_tensors(
    first: Tensor,
    others: Sequence[Tensor],
    amaxes: Tensor,
    sizes: Sequence[int],
    dtype: torch.dtype,
    round_scales_to_power_of_2: bool,
    by_row: bool = False,
) -> tuple[Tensor, Tensor]:
    """Cast many local tensors of one dtype, with one scale each; values above it saturate.

    Args:
        amaxes: flat fp32, in the order of :func:`fp8_dist.kernels.scale.amax_of_tensors`.
        sizes: how many bytes of the result each tensor takes; at least its number of elements. The
            rest is not initialized.
        by_row: use one scale per row.

    Returns:
        The float8 data of all tensors, uint8, and the scales, as ``amaxes``; both flat.
    """
    data, begin = first.new_empty(sum(sizes), dtype=torch.uint8), 0
    scales = torch.empty_like(amaxes)
    for x, out in zip((first, *others), data.split(list(sizes)), strict=True):
        shape = (*x.shape[:-1], 1) if by_row else ()
        part = slice(begin, begin := begin + math.prod(shape))
        how = dtype, round_scales_to_power_of_2, [0], [False]
        scale, qdata = cast_copies(x, [amaxes[part].view(shape)], *how, saturate=True)
        scales[part].view(shape).copy_(scale)
        out[: x.numel()].copy_(qdata.view(torch.uint8).view(-1))
    return data, scales


@custom_op(
    "cast_fresh(Tensor x, ScalarType dtype, bool round_scales_to_power_of_2, bool[] transposed, "
    "bool by_row=False) -> Tensor[]"
)
def cast_fresh(
    x: Tensor,
    dtype: torch.dtype,
    round_scales_to_power_of_2: bool,
    transposed: Sequence[bool],
    by_row: bool = False,
    *,
    measure: Callable[..., Tensor] = amax,
    cast: Callable[..., Tensors] = cast_copies,
) -> Tensors:
    """Measure a local tensor, and cast copies with one scale, or with one scale per row.

    Args:
        measure: computes :func:`fp8_dist.kernels.scale.amax`. It is no argument of the operator.
        cast: computes :func:`cast_copies`. It is no argument of the operator.

    Returns:
        The amaxes, their scales, and the copies.
    """
    own = measure(x, (x.ndim - 1,) if by_row else None)
    of = [0] * len(transposed)
    return [own, *cast(x, [own], dtype, round_scales_to_power_of_2, of, transposed)]


@custom_op()
def cast_and_measure(
    x: Tensor,
    known: Tensor,
    dtype: torch.dtype,
    round_scales_to_power_of_2: bool,
    transposed: Sequence[bool],
) -> Tensors:
    """Cast copies with the scale of a given amax, and return the amax of ``x`` for a later scale.

    Args:
        known: the amax from which the scale is computed, fp32, 0-dim.

    Returns:
        The amax of ``x``; the scale, which is NaN if that amax is not finite; and the copies. With
        a NaN scale all values dequantize to NaN, whatever their bytes are.
    """
    value = amax(x)
    known = torch.add(known, value, alpha=0)  # NaN if the value is not finite
    of, power_of_2 = [0] * len(transposed), round_scales_to_power_of_2
    scale, *copies = cast_copies(x, [known], dtype, power_of_2, of, transposed, saturate=True)
    return [value, scale, *copies]
