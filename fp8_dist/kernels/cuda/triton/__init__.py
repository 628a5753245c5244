"""Fused kernels in Triton, which write the layouts that GEMMs read.

Importing this package registers implementations of the operators of :mod:`fp8_dist.kernels` on
CUDA devices. They produce the same bits as the portable implementations, and fall back to these for
arguments that the kernels do not support, mainly dtypes other than bf16, fp16 and fp32. In Triton's
interpreter the kernels run on CPU tensors.

The docstring of an implementation gives the number of its launches, and the bytes that it moves. A
comment at the top of a kernel says which part of the work one program instance does.
"""

from fp8_dist.kernels.cuda.triton import amaxes, blocks, casts, e2m1, encoding, folded

__all__ = ["amaxes", "blocks", "casts", "e2m1", "encoding", "folded"]
