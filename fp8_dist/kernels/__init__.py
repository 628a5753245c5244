"""Local computation on float8 data: amax, scale, cast and scaled GEMM.

Kernels take and return plain tensors. They do not depend on a mesh, a config or a layer. Each is an
operator with a portable implementation. GPUs and CPUs also have implementations of their own: fused
kernels in :mod:`fp8_dist.kernels.cuda`, and emulation in :mod:`fp8_dist.kernels.cpu`.
"""

import torch

from fp8_dist.kernels import cpu as cpu  # registers its implementations

if torch.version.cuda is not None or torch.version.hip is not None:
    from fp8_dist.kernels import cuda as cuda  # registers its implementations too
