"""Fused kernels in Triton, which write the layouts that GEMMs read.

Importing this package registers implementations of the operators of :mod:`fp8_dist.kernels` on
CUDA devices, with the bits of the portable ones. They leave arguments that the kernels do not
support to those: mainly dtypes other than bf16, fp16 and fp32. In Triton's interpreter they run on
CPU tensors.
"""

from fp8_dist.kernels.cuda.triton import (
    amaxes,
    block_gemm,
    blocks,
    casts,
    encoding,
    folded,
    transposing,
)

__all__ = ["amaxes", "block_gemm", "blocks", "casts", "encoding", "folded", "transposing"]
