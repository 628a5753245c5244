"""Local computation on float8 data: amax, scale, cast and scaled GEMM.

Kernels take and return plain tensors. They do not depend on a mesh, a config or a layer. Each is an
operator with a portable implementation. Some devices have their own implementations: fused kernels
for GPUs in :mod:`fp8_dist.kernels.cuda`, and emulation on CPUs in :mod:`fp8_dist.kernels.cpu`.
"""

import torch

# Importing cpu registers its implementations.
from fp8_dist.kernels import cpu
from fp8_dist.kernels.block_casts import (
    block_exponents_of_each,
    cast_blocks,
    fuses_blocks,
    quantize_block_copies,
    quantize_blocks_of_each,
)
from fp8_dist.kernels.block_gemm import block_scaled_mm
from fp8_dist.kernels.blocks import (
    block_exponents,
    blocks_along,
    expanded,
    exponents_of_groups,
    exponents_shape,
    powers_of_2,
    quantize_blocks,
    reblock,
    reblock_groups,
    scaled_by,
)
from fp8_dist.kernels.copies import (
    amaxes,
    cast_and_record,
    cast_copies,
    cast_rows,
    covered_dims,
    empty_copies,
    fuses_rows,
    quantize_copies,
)
from fp8_dist.kernels.custom_op import CustomOp, custom_op
from fp8_dist.kernels.gemm import (
    ALIGNMENT,
    needs_alignment,
    scaled_mm,
    takes_transposed,
)
from fp8_dist.kernels.quantization import fuses_many, quantize, quantize_after, quantize_each
from fp8_dist.kernels.scale import Scaling, amax, amax_of_each, scaling_from_amax
from fp8_dist.kernels.transposing import TransposedTogether, transposed_copy

if torch.version.cuda is not None or torch.version.hip is not None:
    from fp8_dist.kernels.cuda.registration import register_kernels

    register_kernels()

__all__ = [
    "ALIGNMENT",
    "CustomOp",
    "Scaling",
    "TransposedTogether",
    "amax",
    "amax_of_each",
    "amaxes",
    "block_exponents",
    "block_exponents_of_each",
    "block_scaled_mm",
    "blocks_along",
    "cast_and_record",
    "cast_blocks",
    "cast_copies",
    "cast_rows",
    "covered_dims",
    "cpu",
    "custom_op",
    "empty_copies",
    "expanded",
    "exponents_of_groups",
    "exponents_shape",
    "fuses_blocks",
    "fuses_many",
    "fuses_rows",
    "needs_alignment",
    "powers_of_2",
    "quantize",
    "quantize_after",
    "quantize_block_copies",
    "quantize_blocks",
    "quantize_blocks_of_each",
    "quantize_copies",
    "quantize_each",
    "reblock",
    "reblock_groups",
    "scaled_by",
    "scaled_mm",
    "scaling_from_amax",
    "takes_transposed",
    "transposed_copy",
]
