"""Local computation on float8 data: amax, scale, cast and scaled GEMM.

Kernels take and return plain tensors. They do not depend on a mesh, a config or a layer. Each is an
operator with a portable implementation. GPUs and CPUs also have implementations of their own: fused
kernels in :mod:`fp8_dist.kernels.cuda`, and emulation in :mod:`fp8_dist.kernels.cpu`.
"""

import torch

# Importing cpu registers its implementations.
from fp8_dist.kernels import cpu as cpu
from fp8_dist.kernels.blocks import block_exponents as block_exponents, fp32_scales as fp32_scales
from fp8_dist.kernels.custom_op import CustomOp as CustomOp, custom_op as custom_op
from fp8_dist.kernels.e2m1 import E2M1_X2 as E2M1_X2, pack_e2m1 as pack_e2m1
from fp8_dist.kernels.folding import fold_groups as fold_groups, unit_scales as unit_scales
from fp8_dist.kernels.gemm import (
    GemmOptions as GemmOptions,
    block_scaled_mm as block_scaled_mm,
    fusible_scaled_mm as fusible_scaled_mm,
    needs_alignment as needs_alignment,
    scaled_mm as scaled_mm,
    takes_transposed as takes_transposed,
)
from fp8_dist.kernels.grouped import (
    Groups as Groups,
    grouped_scaled_mm as grouped_scaled_mm,
    grouped_scaled_sums as grouped_scaled_sums,
    has_grouped_gemm as has_grouped_gemm,
    transposed_groups as transposed_groups,
    without_empty as without_empty,
)
from fp8_dist.kernels.quantization import (
    ALIGNMENT as ALIGNMENT,
    cast_and_measure as cast_and_measure,
    cast_copies as cast_copies,
    cast_rows as cast_rows,
    empty_copies as empty_copies,
    fusible_copies as fusible_copies,
    quantize as quantize,
    transposed_copy as transposed_copy,
)
from fp8_dist.kernels.scale import (
    amax as amax,
    amax_of_tensors as amax_of_tensors,
    amaxes as amaxes,
    fusible_amax as fusible_amax,
    magnitudes as magnitudes,
    scaling_from_amax as scaling_from_amax,
)

if torch.version.cuda is not None or torch.version.hip is not None:
    # Importing cuda registers its implementations too.
    from fp8_dist.kernels import cuda as cuda
