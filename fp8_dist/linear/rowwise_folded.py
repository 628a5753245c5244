"""Rowwise scales with one float8 copy of each operand: the recipe ``rowwise_folded``.

With x = input ``[M, K]``, w = weight ``[N, K]``, g = grad_output ``[M, N]``; ``t[m]``, ``s[n]`` the
scales of the rows of x and w (dequantization scales, powers of two); xq, wq their float8 data::

    output[m,n]      = sum_k x[m,k] w[n,k] = t[m] s[n] sum_k xq[m,k] wq[n,k]
    grad_input[m,k]  = sum_n g[m,n] w[n,k] = sum_n (g[m,n] s[n]) wq[n,k]
    grad_weight[n,k] = sum_m g[m,n] x[m,k] = sum_m (g[m,n] t[m]) xq[m,k]

In the output both scales stand outside of the sum. In a gradient one of them runs along the
contraction, where a GEMM can't apply it; it is folded into g instead, whose own scales can then be
chosen along the dim that stays. So xq and wq serve two GEMMs each, and are what travels::

    g0 = cast_rows(g)             scale r0[m]     what travels, and what both folds start from
    g1 = cast_rows(g0 * s)        scale r1[m]     grad_input[m,k]  = r1[m] sum_n g1q[m,n] wq[n,k]
    g2 = cast_columns(g0 * t)     scale c[n]      grad_weight[n,k] = c[n]  sum_m g2q[m,n] xq[m,k]

All scales are powers of two: to fold one in and cast again changes exponents alone, and the second
rounding is exact, but for values that fall below the range of the new scale (2^-17 of the largest
of their row or column), which the sum they go into can't notice.

Why not fold s before the first cast, and take g2 from ``g1 / s``? One cast less; but where a row of
the weight is small beside others, its column of g1 underflows though grad_weight needs it: rows of
zeros would never get a gradient.

r1 is taken from ``g * s`` in high precision, together with r0. Where N is sharded, one all-reduce
serves both. Where rows travel, none is needed: r1 travels with them, 4 bytes a row.

What is folded in is ``scale * UNIT`` (:mod:`fp8_dist.kernels.folding`): gradients of 1e-12 lose
nothing beside weights of usual size, and some dB beside weights of 1e-5.

What one float8 copy of g can't do: values that fall below the range of g0 beside the largest of
their row are lost to grad_weight, whose columns might have kept them.
"""

import math

import torch
from torch.distributed.tensor import DTensor

from fp8_dist.cast import global_amax, local_amax
from fp8_dist.config import CastSpec, Gemm
from fp8_dist.granularity import COLUMN, ROW
from fp8_dist.kernels import quantize, scaling_from_amax
from fp8_dist.kernels.folding import UNIT, first_fold, fold_gradient, row_amaxes, unit_scales
from fp8_dist.linear.observing import Owner, is_observed, observe
from fp8_dist.mesh import Layout, Placements, has_pieces, local_tensor, sharded_dim
from fp8_dist.tensor import Float8Tensor, Quantized
from fp8_dist.tensor.ops import as_bytes, pack_rows, unpack_rows


def folded_gradients(
    grad: torch.Tensor,
    cast: CastSpec,
    placements: Placements | None,
    weight: Quantized | None,
    input: Quantized | None,
    axes: tuple[int, ...] | None,
    transposed: bool,
    owner: Owner,
) -> dict[Gemm, tuple[Quantized, Quantized]]:
    """The operands of the two gradient GEMMs: g1 and wq, g2 and xq.

    Args:
        grad: grad_output ``[..., N]``, local or a DTensor without Partial placements.
        cast: its cast (rows).
        placements: where the GEMMs need a DTensor.
        weight: the local weight ``[N, K]`` with scales s; ``None`` where g1 is not needed.
        input: the local input ``[..., K]`` with scales t, as the GEMM of grad_weight takes it;
            ``None`` where g2 is not needed.
        axes: as in :func:`fp8_dist.cast.scaling_over`.
        transposed: write g2 transposed, if the gradient is local.
        owner: the layer's ``float8_weight``.

    Returns:
        Local operands; the scales of the right one are 1, since they were folded into the left one.

    Collectives: an all-gather of 1 byte per element and 8 per row for a grad that is gathered; an
    all-reduce of 8 bytes per row where N is sharded; one of 4 bytes per column where rows are.
    """
    grad = _with_whole_rows(grad, placements)
    if isinstance(grad, DTensor):
        assert placements is not None
        operands = _folded(grad, cast, placements, weight, input, axes)
    else:
        operands = _folded_locally(grad, cast, weight, input, transposed)
    if is_observed():
        operands = _observed(operands, grad, placements, weight, input, owner)
    return operands


def _folded(
    grad: DTensor,
    cast: CastSpec,
    placements: Placements,
    weight: Quantized | None,
    input: Quantized | None,
    axes: tuple[int, ...] | None,
) -> dict[Gemm, tuple[Quantized, Quantized]]:
    """:func:`folded_gradients` of a DTensor whose rows are whole."""
    local, layout = local_tensor(grad), Layout.of(grad)
    assert layout is not None
    weight_fold = None if weight is None else weight.scale.reshape(-1) * UNIT
    value = global_amax(row_amaxes(local, weight_fold), grad, ROW, axes)
    multipliers, scales = scaling_from_amax(value, cast.dtype, True)
    qdata = quantize(local, multipliers[..., :1], cast.dtype, fits=True)
    # What belongs to each row: its scale in g0, and the multiplier of g1.
    numbers = torch.cat([scales[..., :1], multipliers[..., 1:]], dim=-1)

    if layout.placements != placements:
        qdata, numbers = _moved(qdata, numbers, layout, placements)
    layout = layout._replace(placements=placements)

    one = _unit_scale(weight, input)
    g0 = qdata.to(torch.float32) * numbers[..., :1]
    operands: dict[Gemm, tuple[Quantized, Quantized]] = {}
    if weight is not None and weight_fold is not None:
        g1, scale = first_fold(g0, weight_fold, numbers[..., 1:], cast.dtype)
        operands["grad_input"] = (
            Quantized(g1, scale, ROW),
            weight._replace(scale=one, granularity=COLUMN),
        )
    if input is not None:
        folded = g0 * (input.scale * UNIT)
        value = global_amax(local_amax(folded, COLUMN), layout.wrap(folded), COLUMN, axes)
        multiplier, scale = scaling_from_amax(value, cast.dtype, True)
        g2 = quantize(folded, multiplier, cast.dtype, fits=True)
        left = Quantized(g2, scale / UNIT, COLUMN)
        operands["grad_weight"] = (left, input._replace(scale=one, granularity=COLUMN))
    return operands


def _observed(
    operands: dict[Gemm, tuple[Quantized, Quantized]],
    grad: torch.Tensor,
    placements: Placements | None,
    weight: Quantized | None,
    input: Quantized | None,
    owner: Owner,
) -> dict[Gemm, tuple[Quantized, Quantized]]:
    """Show g1 and g2 to observers, beside the high-precision gradient times the folded scales.

    Of operands that were gathered to ``placements`` the part whose gradient is here.
    """
    layout, high = Layout.of(grad), local_tensor(grad).to(torch.float32)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if layout is None or placements is None or layout.placements == placements:
            return tensor
        shape = torch.Size((*layout.shape[:-1], tensor.shape[-1]))
        gathered = layout._replace(placements=placements, shape=shape).wrap(tensor)
        return local_tensor(gathered.redistribute(placements=layout.placements))

    shown = {}
    for gemm, (left, right) in operands.items():
        qdata, scale, granularity = left
        if gemm == "grad_input":
            assert weight is not None
            folds, scale = weight.scale.reshape(-1), own(scale)
        else:
            assert input is not None
            folds = own(input.scale.reshape(*qdata.shape[:-1], 1))
        part = own(as_bytes(qdata)).view(qdata.dtype)
        folded, low = high.reshape(part.shape) * folds, Quantized(part, scale, granularity)
        carrier = observe(owner, "grad_output", (gemm,), folded, low, False, left.scale)
        shown[gemm] = (left._replace(scale=carrier), right)
    return shown


def _folded_locally(
    grad: torch.Tensor,
    cast: CastSpec,
    weight: Quantized | None,
    input: Quantized | None,
    transposed: bool,
) -> dict[Gemm, tuple[Quantized, Quantized]]:
    s = None if weight is None else weight.scale.reshape(-1)
    t = None if input is None else input.scale.reshape(-1)
    matrix = grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1])
    one = _unit_scale(weight, input)
    made = iter(fold_gradient(matrix, cast.dtype, s, t, transposed))
    operands: dict[Gemm, tuple[Quantized, Quantized]] = {}
    if weight is not None:
        left = Quantized(next(made), next(made), ROW)
        operands["grad_input"] = (left, weight._replace(scale=one, granularity=COLUMN))
    if input is not None:
        g2 = next(made)
        left = Quantized(g2.t() if transposed else g2, next(made), COLUMN)
        operands["grad_weight"] = (left, input._replace(scale=one, granularity=COLUMN))
    return operands


def _unit_scale(*operands: Quantized | None) -> torch.Tensor:
    """Those of both operands: of a shape that a GPU's GEMM takes beside the scales of rows."""
    return unit_scales(next(each for each in operands if each is not None).qdata)


def _with_whole_rows(grad: torch.Tensor, placements: Placements | None) -> torch.Tensor:
    """A grad whose rows are cast where they are: moved first if rows themselves are in parts.

    (Where an output was sharded along its columns, or is to be.) Or if ranks have several pieces.
    """
    if not isinstance(grad, DTensor):
        return grad
    assert placements is not None
    now = tuple(grad.placements)
    in_parts = grad.ndim - 1 in [sharded_dim(p, grad.ndim) for p in (*now, *placements)]
    in_parts = in_parts or has_pieces(now)
    return grad.redistribute(placements=placements) if in_parts and now != placements else grad


def _moved(
    qdata: torch.Tensor, numbers: torch.Tensor, layout: Layout, placements: Placements
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and what belongs to them at other placements, in one message."""
    # Wrapped as float8, which most of the bytes are, so that comm_audit counts it as float8.
    packed = pack_rows(qdata, numbers)
    shape = torch.Size((*layout.shape[:-1], packed.shape[-1]))
    carrier = Float8Tensor(packed, numbers.new_ones(()), torch.float32)
    wrapped = layout._replace(shape=shape).wrap(carrier)
    moved = local_tensor(wrapped.redistribute(placements=placements))
    assert isinstance(moved, Float8Tensor)
    return unpack_rows(as_bytes(moved.qdata.contiguous()), qdata.dtype, qdata.shape[-1])
