"""Kernels for GPUs: fused kernels in Triton, or torch's operators if Triton is not installed.

Both routes have the same functions, on matrices ``[M, K]``, with the bits of the portable
implementations. A cast writes the requested layouts, so a GEMM needs no transposing copy. PyTorch
installs Triton on Linux with CUDA.
"""

from importlib.util import find_spec

from fp8_dist.kernels.cuda.results import DTYPES, BlockCast, Cast, FoldedRows, Layouts

HAS_TRITON = find_spec("triton") is not None

if HAS_TRITON:
    from fp8_dist.kernels.cuda.triton import (
        amax,
        amax_of_rows_and_columns,
        amaxes,
        block_exponents,
        cast,
        cast_and_record,
        cast_blocks,
        cast_rows,
        cast_rows_and_columns,
        decode_float8,
        dequantize,
        encode_float8,
        exponents_of_many,
        fold_columns,
        fold_rows,
        gemm_scales,
        quantize,
        quantize_blocks,
        quantize_many,
        quantize_many_blocks,
        reblock,
        row_amaxes,
        scaling,
        sum_of_float8,
        sum_of_rows,
        tiled_exponents,
        transpose,
        transpose_many,
    )
else:
    from fp8_dist.kernels.cuda.block_operators import (
        block_exponents,
        cast_blocks,
        dequantize,
        exponents_of_many,
        gemm_scales,
        quantize_blocks,
        quantize_many_blocks,
        reblock,
        tiled_exponents,
    )
    from fp8_dist.kernels.cuda.operators import (
        amax,
        amax_of_rows_and_columns,
        amaxes,
        cast,
        cast_and_record,
        cast_rows,
        cast_rows_and_columns,
        decode_float8,
        encode_float8,
        fold_columns,
        fold_rows,
        quantize,
        quantize_many,
        row_amaxes,
        scaling,
        sum_of_float8,
        sum_of_rows,
        transpose,
        transpose_many,
    )

__all__ = [
    "DTYPES",
    "HAS_TRITON",
    "BlockCast",
    "Cast",
    "FoldedRows",
    "Layouts",
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
