"""Casts of a gradient for its two GEMMs, with the scales of the other operands folded into it.

:mod:`fp8_dist.linear.rowwise_folded` has the derivation and defines the names.
"""

import torch

from fp8_dist.kernels.blocks import amaxes_of_groups
from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.kernels.grouped import rows_of_groups
from fp8_dist.kernels.quantization import quantize, transposed_copy
from fp8_dist.kernels.scale import amax, scaling_from_amax

# The factor that is folded in is ``scale * UNIT``. It is about as large as the largest value of a
# row, while the scale is 1/448 of that value. This keeps products of small gradients away from the
# epsilon of fp8_dist.kernels.scale.
UNIT = 512.0


@custom_op()
def fold_gradient(
    grad: torch.Tensor,
    dtype: torch.dtype,
    weight_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    transposed: bool,
) -> list[torch.Tensor]:
    """Fold scales into a local gradient and cast it, if its amaxes need no reduction over ranks.

    Args:
        grad: grad_output ``[M, N]``, high precision.
        dtype: a float8 dtype.
        weight_scale: s, ``[N]``; ``None`` if g1 is not needed.
        input_scale: t, ``[M]``; ``None`` if g2 is not needed.
        transposed: write g2 as ``[N, M]``.

    Returns:
        If needed, g1 ``[M, N]`` and its scale ``[M, 1]``; then, if needed, g2 and its scale
        ``[1, N]``.
    """
    weight_fold = None if weight_scale is None else weight_scale * UNIT
    multipliers, scales = scaling_from_amax(row_amaxes(grad, weight_fold), dtype, True)
    g0 = quantize(grad, multipliers[:, :1], dtype, saturate=False).to(torch.float32) * scales[:, :1]
    results: list[torch.Tensor] = []
    if weight_fold is not None:
        results += fold_weight_scale(g0, weight_fold, multipliers[:, 1:], dtype)
    if input_scale is not None:
        folded = g0 * (input_scale * UNIT).view(-1, 1)
        multiplier, scale = scaling_from_amax(amax(folded, (0,)), dtype, True)
        g2 = quantize(folded, multiplier, dtype, saturate=False)
        results += [transposed_copy(g2) if transposed else g2, scale / UNIT]
    return results


@custom_op()
def fold_groups(
    g0: torch.Tensor,
    scale: torch.Tensor,
    weight_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    group: torch.Tensor,
    groups: int,
    source: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Fold the scales of several layers into their gradients, which were cast by rows already.

    Args:
        g0: float8 ``[M, N]``, the gradients of all layers, one layer after the other.
        scale: the scales of its rows, fp32 ``[M, 1]``, powers of two.
        weight_scale: s of each layer, ``[E, N]``; ``None`` if g1 is not needed.
        input_scale: t, ``[M]``; ``None`` if g2 is not needed.
        group: the layer of each row, int64 ``[M]``, in ascending order.
        groups: the number of layers, E.
        source: write g2 as :func:`fp8_dist.kernels.grouped.rows_of_groups` does.

    Returns:
        If needed, g1 ``[M, N]`` and its scale ``[M, 1]``; then, if needed, g2 ``[M, N]``, or
        ``[N, P]`` with ``source``, and its scale ``[E, N]``.
    """
    values, dtype = g0.to(torch.float32) * scale, g0.dtype
    results: list[torch.Tensor] = []
    if weight_scale is not None:
        fold = (weight_scale * UNIT).index_select(0, group)
        multiplier, _ = scaling_from_amax(amax(values * fold, (1,)), dtype, True)
        results += fold_weight_scale(values, fold, multiplier, dtype)
    if input_scale is not None:
        values = values * (input_scale * UNIT).view(-1, 1)
        amaxes = amaxes_of_groups(values, group, groups)
        multiplier, scales = scaling_from_amax(amaxes, dtype, True)
        g2 = quantize(values, multiplier.index_select(0, group), dtype, saturate=False)
        results += [g2 if source is None else rows_of_groups(g2, source, True), scales / UNIT]
    return results


@custom_op()
def unit_scales(operand: torch.Tensor) -> torch.Tensor:
    """Return ones ``[1, K]`` in place of folded scales, for an operand ``[..., K]``.

    This is an operator because Inductor would fill ``torch.ones`` again for each GEMM that reads
    it.
    """
    return torch.ones(1, operand.shape[-1], dtype=torch.float32, device=operand.device)


# An operator, because Inductor (2.13) can't view a torch.cat that it has fused as integers.
@custom_op()
def row_amaxes(grad: torch.Tensor, weight_fold: torch.Tensor | None) -> torch.Tensor:
    """Compute the amaxes of the rows of g, ``[..., 1]``, or of g and ``g * s``, ``[..., 2]``."""
    rows = [amax(grad, (grad.ndim - 1,))]
    if weight_fold is not None:
        rows.append(amax(grad.to(torch.float32) * weight_fold, (grad.ndim - 1,)))
    return torch.cat(rows, dim=-1)


def fold_weight_scale(
    g0: torch.Tensor, weight_fold: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return g1 and the scales of its rows."""
    return [quantize(g0 * weight_fold, multiplier, dtype), 1 / (multiplier * UNIT)]
