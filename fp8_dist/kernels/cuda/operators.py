"""The route without Triton: torch's operators, in few passes and with the same bits.

Launches and bytes are torch's. A transpose is an ordinary copy, which reads or writes single bytes.
"""

from collections.abc import Sequence

import torch

from fp8_dist.kernels import encoding
from fp8_dist.kernels.cuda.results import Cast, FoldedRows, Layouts, RecordedCast
from fp8_dist.kernels.folding import UNIT
from fp8_dist.kernels.quantization import quantize_each
from fp8_dist.kernels.scale import amax as portable_amax
from fp8_dist.kernels.scale import scaling_from_amax
from fp8_dist.torch_internals import foreach_norm
from fp8_dist.warn import warn_once

INF = float("inf")


def note_no_triton(x: torch.Tensor) -> None:
    if x.is_cuda:
        warn_once(
            "no Triton",
            "fp8_dist: there is no Triton in this environment; casts to float8 use torch's "
            "operators, which move several times as many bytes. pip install triton (the release "
            "that torch's own metadata names)",
        )


def amax(x: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    """:func:`fp8_dist.kernels.amax` as a norm, which also clears the sign of a NaN."""
    note_no_triton(x)
    if x.numel() == 0 or dims == []:
        return portable_amax.portable(x, dims)
    over = None if dims is None else tuple(dims)
    return torch.linalg.vector_norm(x, INF, over, dims is not None, dtype=torch.float32)


def amax_of_rows_and_columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Amaxes of the rows, ``[M, 1]``, and of the columns, ``[1, K]``, of a matrix."""
    return amax(x, [1]), amax(x, [0])


def amaxes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Amax of each of many tensors on one device: fp32, ``[len(tensors)]``."""
    note_no_triton(tensors[0])
    # The norm of no elements is an error, so one zero replaces them.
    filled = [t if t.numel() else t.new_zeros(1) for t in tensors]
    return torch.stack(foreach_norm(filled, INF, dtype=torch.float32))


def row_amaxes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Amaxes of the rows of many tensors on one device: fp32, flat."""
    return torch.cat([amax(t, [t.ndim - 1]).view(-1) for t in tensors])


def quantize_many(
    tensors: Sequence[torch.Tensor], multipliers: torch.Tensor, dtype: torch.dtype, of_rows: bool
) -> torch.Tensor:
    """Cast many tensors to float8, flat, one after the other."""
    note_no_triton(tensors[0])
    return quantize_each.portable(tensors[0], tensors[1:], multipliers, dtype, of_rows)


def cast(
    x: torch.Tensor,
    amax: torch.Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    *,
    row_major: bool = True,
    column_major: bool = False,
) -> Cast:
    """Cast a matrix to float8 by amaxes that none of its values exceeds."""
    multiplier, scale = scaling_from_amax.portable(amax, dtype, power_of_2)
    layouts = quantize(
        x, multiplier, dtype, fits=True, row_major=row_major, column_major=column_major
    )
    return Cast(*layouts, multiplier, scale)


def quantize(
    x: torch.Tensor,
    multiplier: torch.Tensor,
    dtype: torch.dtype,
    *,
    fits: bool = False,
    row_major: bool = True,
    column_major: bool = False,
) -> Layouts:
    """:func:`fp8_dist.kernels.quantize` of a matrix, in one layout or both."""
    note_no_triton(x)
    qdata = torch.empty(x.shape, dtype=dtype, device=x.device)
    # A 0-dim multiplier would not make the product fp32.
    factor = multiplier if multiplier.ndim else multiplier.reshape(1)
    if fits:
        torch.mul(x, factor, out=qdata)
    else:
        limit = torch.finfo(dtype).max
        qdata.copy_((x * factor).clamp_(-limit, limit))
    qdata_t = qdata.t().contiguous() if column_major else None
    return Layouts(qdata if row_major else None, qdata_t)


def scaling(
    amax: torch.Tensor, dtype: torch.dtype, power_of_2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fp8_dist.kernels.scaling_from_amax`."""
    return scaling_from_amax.portable(amax, dtype, power_of_2)


def cast_and_record(
    x: torch.Tensor,
    multiplier: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    recorded: torch.Tensor | None,
    *,
    row_major: bool = True,
    column_major: bool = False,
) -> RecordedCast:
    """Cast a matrix to float8 with a given multiplier, and return its amax too."""
    value = amax(x)
    layouts = quantize(x, multiplier, dtype, row_major=row_major, column_major=column_major)
    largest = torch.maximum(value if recorded is None else recorded, value)
    return RecordedCast(*layouts, value, scale + value * 0, largest)


def cast_rows(
    x: torch.Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
    *,
    row_major: bool = True,
    column_major: bool = False,
) -> Cast:
    """Compute the amaxes of the rows of a matrix and cast it to float8 with a scale per row."""
    layouts = {"row_major": row_major, "column_major": column_major}
    return cast(x, amax(x, [1]), dtype, power_of_2, **layouts)


def cast_rows_and_columns(
    x: torch.Tensor,
    row_amax: torch.Tensor,
    column_amax: torch.Tensor,
    dtype: torch.dtype,
    power_of_2: bool,
) -> tuple[Cast, Cast]:
    """Cast a matrix to float8 twice: by rows, row-major, and by columns, column-major."""
    by_rows = cast(x, row_amax, dtype, power_of_2)
    return by_rows, cast(x, column_amax, dtype, power_of_2, row_major=False, column_major=True)


def fold_rows(
    grad: torch.Tensor,
    weight_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> FoldedRows:
    """Return g1 and the inputs of the second fold."""
    largest = amax(grad, [1])
    if weight_scale is not None:
        largest = torch.cat([largest, amax(grad * (weight_scale * UNIT), [1])], dim=1)
    multipliers, _ = scaling_from_amax.portable(largest, dtype, True)
    multiplier = multipliers[:, :1]
    g0 = _g0(grad, multiplier, dtype)
    g1 = scale = column_amax = None
    if input_scale is not None:
        column_amax = amax(g0 * (input_scale * UNIT).view(-1, 1), [0])
    if weight_scale is not None:
        g1 = quantize(g0.mul_(weight_scale * UNIT), multipliers[:, 1:], dtype).qdata
        scale = 1 / (multipliers[:, 1:] * UNIT)
    return FoldedRows(multiplier, g1, scale, column_amax)


def fold_columns(
    grad: torch.Tensor,
    multiplier: torch.Tensor,
    input_scale: torch.Tensor,
    column_amax: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return g2, transposed, and its scale c."""
    folded = _g0(grad, multiplier, dtype).mul_((input_scale * UNIT).view(-1, 1))
    g2 = cast(folded, column_amax, dtype, True, row_major=False, column_major=True)
    assert g2.qdata_t is not None
    return g2.qdata_t, g2.scale / UNIT


def _g0(grad: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    qdata = quantize(grad, multiplier, dtype, fits=True).qdata
    assert qdata is not None
    return qdata.to(torch.float32) * torch.reciprocal(multiplier)


def transpose(x: torch.Tensor) -> torch.Tensor:
    """``x.t().contiguous()`` of a matrix with elements of one byte."""
    return x.t().contiguous()


def transpose_many(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """:func:`transpose` of each of several matrices."""
    return [transpose(x) for x in matrices]


def encode_float8(x: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fp8_dist.kernels.encoding.encode_float8`."""
    note_no_triton(x)
    return encoding.encode_float8.portable(x, seed)


def decode_float8(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """:func:`fp8_dist.kernels.encoding.decode_float8`."""
    return encoding.decode_float8.portable(codes, exponents)


def sum_of_float8(
    codes: torch.Tensor, exponents: torch.Tensor, own: torch.Tensor, rank: int
) -> torch.Tensor:
    """:func:`fp8_dist.kernels.encoding.sum_of_float8`."""
    return encoding.sum_of_float8.portable(codes, exponents, own, rank)


def sum_of_rows(rows: torch.Tensor, own: torch.Tensor, rank: int) -> torch.Tensor:
    """:func:`fp8_dist.kernels.encoding.sum_of_rows`."""
    return encoding.sum_of_rows.portable(rows, own, rank)
