"""Kernels for CPUs, which have no float8 arithmetic: exact and fast emulation.

Importing this package registers implementations of the operators of :mod:`fp8_dist.kernels`. The
amax, scale and cast have the bits of the portable implementations. The GEMM is more exact.
"""

from fp8_dist.kernels.cpu import blocks, gemm, quantization, scale

__all__ = ["blocks", "gemm", "quantization", "scale"]
