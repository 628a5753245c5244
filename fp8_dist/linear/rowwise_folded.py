"""Rowwise scales with one float8 copy of each operand: the recipe ``rowwise_folded``.

Let x be the input ``[M, K]``, w the weight ``[N, K]``, and g grad_output ``[M, N]``. Let ``t[m]``
and ``s[n]`` be the dequantization scales of the rows of x and w, powers of two, and let xq and wq
be their float8 data::

    output[m,n]      = sum_k x[m,k] w[n,k] = t[m] s[n] sum_k xq[m,k] wq[n,k]
    grad_input[m,k]  = sum_n g[m,n] w[n,k] = sum_n (g[m,n] s[n]) wq[n,k]
    grad_weight[n,k] = sum_m g[m,n] x[m,k] = sum_m (g[m,n] t[m]) xq[m,k]

In the output, both scales are outside the sum. In each gradient, one of them varies along the
contracted dim, where a GEMM can't apply it. Instead, it is folded into g, and the product is cast
with one scale per index of the dim that is not contracted. So xq and wq each serve two GEMMs, and
each needs one gather::

    g0 = cast_rows(g)             scale r0[m]     gathered; g1 and g2 are computed from it
    g1 = cast_rows(g0 * s)        scale r1[m]     grad_input[m,k]  = r1[m] sum_n g1q[m,n] wq[n,k]
    g2 = cast_columns(g0 * t)     scale c[n]      grad_weight[n,k] = c[n]  sum_m g2q[m,n] xq[m,k]

All scales are powers of two, so folding and casting again only change exponents. The second cast
rounds only values below the range of the new scale (2^-17 of the largest value of their row or
column). They are negligible in the sum.

Folding s before the first cast and taking g2 from ``g1 / s`` would save one cast. But if a row of
the weight is small compared to other rows, the same column of g1 underflows, although grad_weight
needs it. A weight row of zeros would never get a gradient.

r1 is computed from ``g * s`` in high precision, together with r0. If N is sharded, one all-reduce
serves both. If rows are gathered, no all-reduce is needed: r1 is gathered with them, 4 bytes per
row.

The folded factor is ``scale * UNIT`` (:mod:`fp8_dist.kernels.folding`). Gradients of 1e-12 lose no
accuracy with weights of usual size, and some dB with weights of 1e-5.

A limit of a single float8 copy of g: grad_weight loses values of g that underflow in g0, because
they are small compared to the largest value of their row. A cast of g with one scale per column
might keep them.
"""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from fp8_dist import mesh
from fp8_dist.kernels.encoding import as_bytes, pack_rows, unpack_rows
from fp8_dist.kernels.folding import UNIT, fold_gradient, fold_weight_scale, row_amaxes, unit_scales
from fp8_dist.kernels.quantization import as_matrix, quantize
from fp8_dist.kernels.scale import amax, scaling_from_amax
from fp8_dist.mesh import Layout, Placements
from fp8_dist.operand.observers import Owner, Use, is_observed, notify_cast
from fp8_dist.recipe import Gemm
from fp8_dist.scaling import Quantized, Scheme
from fp8_dist.scaling.reduction import reduced_statistics
from fp8_dist.tensor import Float8Tensor


def folded_gradients(
    grad: torch.Tensor,
    scheme: Scheme,
    placements: Placements | None,
    right: Mapping[Gemm, Quantized],
    owner: Owner,
) -> dict[Gemm, tuple[Quantized, Quantized]]:
    """Prepare the operands of the two gradient GEMMs: g1 and wq, g2 and xq.

    Args:
        grad, placements: as in :func:`fp8_dist.linear.autograd.prepare_gradients`.
        scheme: the scheme of grad_output, with one scale per row.
        right: the right operand of each GEMM: first, for grad_input, the local weight ``[N, K]``
            with scales s, then, for grad_weight, the local input ``[..., K]`` with scales t.

    Returns:
        Local operands. The scales of each right operand are 1, because they were folded into the
        left one.

    Collectives: if ``grad`` is gathered, an all-gather of 1 byte per element and 8 bytes per row.
    If N is sharded, an all-reduce of 8 bytes per row. If rows are sharded, an all-reduce of 4 bytes
    per column.
    """
    weight, input = right.get("grad_input"), right.get("grad_weight")
    s = None if weight is None else weight.scales[0].reshape(-1)
    t = None if input is None else input.scales[0]
    if isinstance(grad, DTensor):
        assert placements is not None
        current = tuple(grad.placements)
        sharded = [mesh.sharded_dim(p, grad.ndim) for p in (*current, *placements)]
        in_parts = grad.ndim - 1 in sharded or mesh.has_strided_placements(current)
        if current != placements and in_parts:
            # Rows are sharded, or the shard has several pieces: redistribute in high precision.
            grad = grad.redistribute(placements=placements)
        folded, transposed = _fold_distributed(grad, scheme, placements, s, t), False
    else:
        plan = owner.config.recipe.plan("grad_output", ("grad_weight",), grad.device)
        transposed = any(plan.transposed)
        matrix, t = as_matrix(grad), None if t is None else t.reshape(-1)
        folded = fold_gradient(matrix, scheme.dtype, s, t, transposed)
    # The shape of these scales is one that a GPU's GEMM accepts together with scales of rows.
    ones = unit_scales(next(iter(right.values())).qdata)
    operands: dict[Gemm, tuple[Quantized, Quantized]] = {}
    for (gemm, operand), qdata, scale in zip(right.items(), folded[::2], folded[1::2], strict=True):
        left = Quantized(qdata, (scale,), scheme)
        if gemm == "grad_weight":
            qdata = qdata.t() if transposed else qdata
            left = Quantized(qdata, (scale,), scheme.for_row_contraction)
        columns = operand.scheme.for_row_contraction
        operands[gemm] = left, operand._replace(scales=(ones,), scheme=columns)
    if is_observed():
        _observe(operands, grad, placements, right, owner)
    return operands


def _fold_distributed(
    grad: DTensor,
    scheme: Scheme,
    placements: Placements,
    s: torch.Tensor | None,
    t: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Compute :func:`fold_gradient` for a DTensor. If it is gathered, its rows must be whole."""
    local, layout = mesh.local_tensor(grad), Layout.of(grad)
    assert layout is not None
    dtype, column = scheme.dtype, scheme.for_row_contraction
    weight_fold = None if s is None else s * UNIT
    (value,) = reduced_statistics(scheme, (row_amaxes(local, weight_fold),), layout)
    multipliers, scales = scaling_from_amax(value, dtype, True)
    qdata = quantize(local, multipliers[..., :1], dtype, saturate=False)
    # For each row, its scale in g0 and its multiplier in g1.
    numbers = torch.cat([scales[..., :1], multipliers[..., 1:]], dim=-1)
    if layout.placements != placements:
        packed = pack_rows(qdata, [numbers])
        # Most of the bytes are float8. Wrap them as a Float8Tensor, so that comm_audit counts the
        # message as float8.
        carrier = Float8Tensor(packed, numbers.new_ones(()), torch.float32)
        shape = torch.Size((*layout.shape[:-1], packed.shape[-1]))
        wrapped = layout._replace(shape=shape).wrap(carrier)
        moved = mesh.local_tensor(wrapped.redistribute(placements=placements))
        assert isinstance(moved, Float8Tensor)
        qdata, (numbers,) = unpack_rows(as_bytes(moved.qdata.contiguous()), qdata, [numbers])
    layout = layout._replace(placements=placements)
    g0, copies = qdata.to(torch.float32) * numbers[..., :1], []
    if weight_fold is not None:
        copies += fold_weight_scale(g0, weight_fold, numbers[..., 1:], dtype)
    if t is not None:
        folded = g0 * (t * UNIT)
        columns = (amax(folded, column.levels[0].covered_dims(folded.ndim)),)
        (value,) = reduced_statistics(column, columns, layout)
        multiplier, scale = scaling_from_amax(value, dtype, True)
        copies += [quantize(folded, multiplier, dtype, saturate=False), scale / UNIT]
    return copies


def _observe(
    operands: dict[Gemm, tuple[Quantized, Quantized]],
    grad: torch.Tensor,
    placements: Placements | None,
    right: Mapping[Gemm, Quantized],
    owner: Owner,
) -> None:
    """Notify observers of g1 and g2, with the gradient and the scales that are folded into it.

    If operands were gathered to ``placements``, observers get the part of this rank's gradient.
    """
    layout, high = Layout.of(grad), mesh.local_tensor(grad)

    def part_of(tensor: torch.Tensor) -> torch.Tensor:
        if layout is None or placements is None or layout.placements == placements:
            return tensor
        begins = layout._replace(placements=placements).offset()
        dims = zip(mesh.local_pieces(layout)[:-1], begins, strict=False)
        rows = [tuple((a - begin, b - begin) for a, b in dim) for dim, begin in dims]
        return mesh.taken(tensor, [*rows, ((0, tensor.shape[-1]),)])

    for gemm, (left, _) in operands.items():
        (qdata, (scale,), *_), folded_in = left, right[gemm].scales[0]
        if gemm == "grad_input":
            folds, scale = folded_in.reshape(-1), part_of(scale)
        else:
            if qdata.ndim == 2:  # a transposed copy may have more rows, of zeros
                qdata = qdata[: folded_in.numel()]
            folds = part_of(folded_in.reshape(*qdata.shape[:-1], 1))
        part = part_of(as_bytes(qdata)).view(qdata.dtype)
        low = Quantized(part, (scale,), left.scheme)
        notify_cast(Use((owner,), "grad_output"), high.reshape(part.shape), layout, [low], folds)
