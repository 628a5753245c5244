"""Local computation on float8 data: amax, scale, cast and scaled GEMM.

Kernels take and return plain tensors. They do not depend on a mesh, a config or a layer. Each is an
operator with a portable implementation. GPUs and CPUs also have implementations of their own: fused
kernels in :mod:`fp8_dist.kernels.cuda`, and emulation in :mod:`fp8_dist.kernels.cpu`.
"""

import torch

# Importing cpu registers its implementations.
from fp8_dist.kernels import cpu
from fp8_dist.kernels.blocks import (
    block_exponents,
    block_exponents_of_each,
    blocks_along,
    cast_blocks,
    expanded,
    exponents_of_groups,
    exponents_shape,
    powers_of_2,
    quantize_block_copies,
    quantize_blocks,
    quantize_blocks_of_each,
    reblock,
    reblock_groups,
    scaled_by,
)
from fp8_dist.kernels.custom_op import CustomOp, custom_op
from fp8_dist.kernels.gemm import (
    ALIGNMENT,
    block_scaled_mm,
    needs_alignment,
    scaled_mm,
    takes_transposed,
)
from fp8_dist.kernels.quantization import (
    cast_and_record,
    cast_copies,
    cast_rows,
    empty_copies,
    quantize,
    quantize_copies,
    quantize_each,
    transposed_copy,
)
from fp8_dist.kernels.scale import Scaling, amax, amax_of_each, amaxes, scaling_from_amax

__all__ = [
    "ALIGNMENT",
    "CustomOp",
    "Scaling",
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
    "cpu",
    "custom_op",
    "empty_copies",
    "expanded",
    "exponents_of_groups",
    "exponents_shape",
    "needs_alignment",
    "powers_of_2",
    "quantize",
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

if torch.version.cuda is not None or torch.version.hip is not None:
    # Importing cuda registers its implementations too.
    from fp8_dist.kernels import cuda

    __all__ += ["cuda"]
