"""Implementations of the operators on CUDA devices, by the kernels of this package.

Inputs that the kernels do not support use the portable implementations: dtypes other than bf16,
fp16 and fp32, and amaxes over dims other than those of rows and columns.
"""

from collections.abc import Sequence
from functools import cache, partial

import torch

from fp8_dist.kernels import cuda
from fp8_dist.kernels.copies import (
    Tensors,
    amaxes,
    cast_and_record,
    cast_copies,
    cast_rows,
    covered_dims,
    quantize_copies,
)
from fp8_dist.kernels.cuda.block_registration import register_block_kernels
from fp8_dist.kernels.cuda.zeros import pooled
from fp8_dist.kernels.encoding import (
    decode_float8,
    encode_float8,
    sum_of_float8,
    sum_of_rows,
)
from fp8_dist.kernels.folding import fold_gradient
from fp8_dist.kernels.gemm import emulated_mm, scaled_mm, scaled_mm_with
from fp8_dist.kernels.quantization import quantize, quantize_after, quantize_each
from fp8_dist.kernels.scale import Scaling, amax, amax_of_each, scaling_from_amax
from fp8_dist.kernels.transposing import transposed, transposed_copies, transposed_copy


def _amax(x: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    if x.dtype not in cuda.DTYPES:
        return amax.portable(x, dims)
    if dims is None:
        return cuda.amax(x)
    for covers, dim in (("row", 1), ("column", 0)):
        if x.ndim > 1 and tuple(dims) == covered_dims(covers, x.ndim):
            shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
            return cuda.amax(x.flatten(0, -2), [dim]).view(shape)
    return amax.portable(x, dims)


def _amax_of_each(
    first: torch.Tensor, others: Sequence[torch.Tensor], of_rows: bool = False
) -> torch.Tensor:
    tensors = [first, *others]
    if not _are_alike(tensors):
        return amax_of_each.portable(first, others, of_rows)
    return cuda.row_amaxes(tensors) if of_rows else cuda.amaxes(tensors)


def _quantize_each(
    first: torch.Tensor,
    others: Sequence[torch.Tensor],
    multipliers: torch.Tensor,
    dtype: torch.dtype,
    of_rows: bool,
) -> torch.Tensor:
    tensors = [first, *others]
    if not _are_alike(tensors):
        return quantize_each.portable(first, others, multipliers, dtype, of_rows)
    return cuda.quantize_many(tensors, multipliers.contiguous(), dtype, of_rows)


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one launch can process all of the tensors."""
    dtype = tensors[0].dtype
    return dtype in cuda.DTYPES and all(x.dtype is dtype and x.is_contiguous() for x in tensors)


def _scaling_from_amax(
    amax: torch.Tensor, dtype: torch.dtype, round_scales_to_power_of_2: bool = False
) -> Scaling:
    if amax.dtype is not torch.float32:
        return scaling_from_amax.portable(amax, dtype, round_scales_to_power_of_2)
    return cuda.scaling(amax, dtype, round_scales_to_power_of_2)


def _amaxes(x: torch.Tensor, covers: Sequence[str]) -> Tensors:
    if x.dtype not in cuda.DTYPES or x.ndim < 2:
        return amaxes.portable(x, covers)
    if set(covers) == {"row", "column"}:
        row, column = cuda.amax_of_rows_and_columns(x.flatten(0, -2))
        column = column.view(*[1] * (x.ndim - 1), -1)
        found = {"row": row.view(*x.shape[:-1], 1), "column": column}
    else:
        found = {name: _amax(x, covered_dims(name, x.ndim)) for name in covers if name != "tensor"}
        rows = found.get("row")
        found["tensor"] = _amax(x) if rows is None or not rows.numel() else rows.amax()
    return [found[name] for name in covers]


def _quantize(
    x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, *, fits: bool = False
) -> torch.Tensor:
    if not _takes(x, [multiplier]):
        return quantize.portable(x, multiplier, dtype, fits=fits)
    qdata = cuda.quantize(_matrix(x), _of_matrix(multiplier), dtype, fits=fits).qdata
    assert qdata is not None
    return qdata.view(x.shape)


def _quantize_after(
    x: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype, after: torch.Tensor
) -> torch.Tensor:
    return _quantize(x, multiplier, dtype)


def _quantize_copies(
    x: torch.Tensor,
    multipliers: Sequence[torch.Tensor],
    dtype: torch.dtype,
    of: Sequence[int],
    transposed: Sequence[bool],
    *,
    fits: bool = False,
) -> Tensors:
    if not _takes(x, multipliers):
        return quantize_copies.portable(x, multipliers, dtype, of, transposed, fits=fits)
    made: dict[tuple[int, bool], torch.Tensor | None] = {}
    wanted = list(zip(of, transposed, strict=True))
    for i in dict.fromkeys(of):
        layouts = cuda.quantize(
            _matrix(x),
            _of_matrix(multipliers[i]),
            dtype,
            fits=fits,
            row_major=(i, False) in wanted,
            column_major=(i, True) in wanted,
        )
        made[i, False], made[i, True] = layouts
    return [_shaped(made[each], x, each[1]) for each in wanted]


def _cast_copies(
    x: torch.Tensor,
    amaxes: Sequence[torch.Tensor],
    dtype: torch.dtype,
    round_scales_to_power_of_2: bool,
    of: Sequence[int],
    transposed: Sequence[bool],
) -> Tensors:
    if not _takes(x, amaxes):
        return cast_copies.portable(x, amaxes, dtype, round_scales_to_power_of_2, of, transposed)
    matrix, wanted = _matrix(x), list(zip(of, transposed, strict=True))
    if wanted == [(0, False), (1, True)] and _are_of_rows_and_columns(amaxes, x):
        row, column = map(_of_matrix, amaxes)
        casts: Sequence[cuda.Cast] = cuda.cast_rows_and_columns(
            matrix, row, column, dtype, round_scales_to_power_of_2
        )
    else:
        casts = [
            cuda.cast(
                matrix,
                _of_matrix(each),
                dtype,
                round_scales_to_power_of_2,
                row_major=(i, False) in wanted,
                column_major=(i, True) in wanted,
            )
            for i, each in enumerate(amaxes)
        ]
    made: Tensors = []
    for (_, _, multiplier, scale), each in zip(casts, amaxes, strict=True):
        made += _like(multiplier, each), _like(scale, each)
    for i, turned in wanted:
        made.append(_shaped(casts[i][turned], x, turned))
    return made


def _are_of_rows_and_columns(scales: Sequence[torch.Tensor], x: torch.Tensor) -> bool:
    expected = (*x.shape[:-1], 1), (*[1] * (x.ndim - 1), x.shape[-1])
    return tuple(scale.shape for scale in scales) == expected


def _cast_rows(
    x: torch.Tensor,
    dtype: torch.dtype,
    round_scales_to_power_of_2: bool,
    transposed: Sequence[bool],
) -> Tensors:
    if not _takes(x, []):
        return cast_rows.portable(x, dtype, round_scales_to_power_of_2, transposed)
    layouts = {"row_major": False in transposed, "column_major": True in transposed}
    cast = cuda.cast_rows(_matrix(x), dtype, round_scales_to_power_of_2, **layouts)
    shape = (*x.shape[:-1], 1)
    copies = [_shaped(cast[1 if turned else 0], x, turned) for turned in transposed]
    return [cast.multiplier.view(shape), cast.scale.view(shape), *copies]


def _cast_and_record(
    x: torch.Tensor,
    multiplier: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    transposed: Sequence[bool],
    recorded: torch.Tensor | None,
) -> Tensors:
    if not _takes(x, []):
        return cast_and_record.portable(x, multiplier, scale, dtype, transposed, recorded)
    layouts = {"row_major": False in transposed, "column_major": True in transposed}
    cast = cuda.cast_and_record(_matrix(x), multiplier, scale, dtype, recorded, **layouts)
    copies = [_shaped(cast[1 if turned else 0], x, turned) for turned in transposed]
    return [cast.amax, cast.scale, cast.largest, *copies]


def _fold_gradient(
    grad: torch.Tensor,
    dtype: torch.dtype,
    weight_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    transposed: bool,
) -> Tensors:
    if not transposed or grad.dtype not in cuda.DTYPES:
        return fold_gradient.portable(grad, dtype, weight_scale, input_scale, transposed)
    rows = cuda.fold_rows(grad, weight_scale, input_scale, dtype)
    made: Tensors = []
    if rows.qdata is not None and rows.scale is not None:
        made += [rows.qdata, rows.scale]
    if input_scale is not None and rows.column_amax is not None:
        column_amax = rows.column_amax
        made += cuda.fold_columns(grad, rows.multiplier, input_scale, column_amax, dtype)
    return made


def _transposed_copies(first: torch.Tensor, others: Sequence[torch.Tensor]) -> Tensors:
    return cuda.transpose_many([first, *others])


def _encode_float8(x: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    takes = x.dtype in cuda.DTYPES
    return cuda.encode_float8(x, seed) if takes else encode_float8.portable(x, seed)


def _sum_of_float8(
    codes: torch.Tensor, exponents: torch.Tensor, own: torch.Tensor, rank: int
) -> torch.Tensor:
    takes = own.dtype in cuda.DTYPES
    run = cuda.sum_of_float8 if takes else sum_of_float8.portable
    return run(codes, exponents, own, rank)


def _sum_of_rows(rows: torch.Tensor, own: torch.Tensor, rank: int) -> torch.Tensor:
    takes = rows.dtype in cuda.DTYPES and own.dtype in cuda.DTYPES
    return (cuda.sum_of_rows if takes else sum_of_rows.portable)(rows, own, rank)


def _takes(x: torch.Tensor, scales: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels support ``x``, flattened to a matrix, with these scales."""
    if x.dtype not in cuda.DTYPES or x.ndim < 2:
        return False
    for scale in scales:
        if not scale.ndim:
            continue
        if scale.shape not in ((*x.shape[:-1], 1), (*[1] * (x.ndim - 1), x.shape[-1])):
            return False
    return True


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x if x.ndim == 2 else x.flatten(0, -2)


def _of_matrix(scale: torch.Tensor) -> torch.Tensor:
    return scale.flatten(0, -2) if scale.ndim > 2 else scale


def _like(scale: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return scale if given.ndim <= 2 else scale.view(given.shape)


def _shaped(data: torch.Tensor | None, like: torch.Tensor, transposed: bool) -> torch.Tensor:
    assert data is not None
    return data if transposed or like.ndim == 2 else data.view(like.shape)


@cache
def register_kernels() -> None:
    """Register the kernels, once."""
    amax.register("cuda", _amax, direct=pooled(_amax))
    amaxes.register("cuda", _amaxes, direct=pooled(_amaxes))
    amax_of_each.register("cuda", _amax_of_each)
    scaling_from_amax.register("cuda", _scaling_from_amax)
    quantize.register("cuda", _quantize)
    quantize_after.register("cuda", _quantize_after)
    quantize_each.register("cuda", _quantize_each)
    quantize_copies.register("cuda", _quantize_copies)
    cast_copies.register("cuda", _cast_copies)
    cast_rows.register("cuda", _cast_rows)
    cast_and_record.register("cuda", _cast_and_record, direct=pooled(_cast_and_record))
    fold_gradient.register("cuda", _fold_gradient)
    transposed_copy.register("cuda", cuda.transpose)
    transposed_copies.register("cuda", _transposed_copies)
    eager = partial(scaled_mm_with, emulated_mm, transpose=transposed)
    scaled_mm.register("cuda", scaled_mm.portable, direct=eager)
    register_block_kernels()
    encode_float8.register("cuda", _encode_float8)
    decode_float8.register("cuda", cuda.decode_float8)
    sum_of_float8.register("cuda", _sum_of_float8)
    sum_of_rows.register("cuda", _sum_of_rows)
