"""Fused kernels in Triton, which write the layouts that GEMMs read.

In Triton's interpreter they run on CPU tensors, with the same bits. Import this package only if
Triton is installed, as :mod:`fp8_dist.kernels.cuda` does.
"""

from fp8_dist.kernels.cuda.triton.blocks import (
    block_exponents,
    cast_blocks,
    quantize_blocks,
)
from fp8_dist.kernels.cuda.triton.casts import cast, cast_rows, quantize
from fp8_dist.kernels.cuda.triton.copies import transpose, transpose_many
from fp8_dist.kernels.cuda.triton.dequantizing import dequantize
from fp8_dist.kernels.cuda.triton.encoding import (
    decode_float8,
    encode_float8,
    sum_of_float8,
    sum_of_rows,
)
from fp8_dist.kernels.cuda.triton.folded import fold_columns, fold_rows
from fp8_dist.kernels.cuda.triton.gemm_scales import gemm_scales, tiled_exponents
from fp8_dist.kernels.cuda.triton.many import amaxes, quantize_many, row_amaxes
from fp8_dist.kernels.cuda.triton.many_blocks import exponents_of_many, quantize_many_blocks
from fp8_dist.kernels.cuda.triton.reblocking import reblock
from fp8_dist.kernels.cuda.triton.recorded import cast_and_record
from fp8_dist.kernels.cuda.triton.reductions import amax
from fp8_dist.kernels.cuda.triton.rows_and_columns import (
    amax_of_rows_and_columns,
    cast_rows_and_columns,
)
from fp8_dist.kernels.cuda.triton.scaling import scaling

__all__ = [
    "amax",
    "amax_of_rows_and_columns",
    "amaxes",
    "block_exponents",
    "cast",
    "cast_and_record",
    "cast_blocks",
    "cast_rows",
    "cast_rows_and_columns",
    "decode_float8",
    "dequantize",
    "encode_float8",
    "exponents_of_many",
    "fold_columns",
    "fold_rows",
    "gemm_scales",
    "quantize",
    "quantize_blocks",
    "quantize_many",
    "quantize_many_blocks",
    "reblock",
    "row_amaxes",
    "scaling",
    "sum_of_float8",
    "sum_of_rows",
    "tiled_exponents",
    "transpose",
    "transpose_many",
]
