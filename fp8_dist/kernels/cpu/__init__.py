"""The kernels on CPUs, which have no float8 arithmetic: emulation, exact and fast.

Importing this package registers implementations of the operators of :mod:`fp8_dist.kernels`. Those
of amax, scale and cast have the bits of the portable ones; the GEMM is more exact than that.
"""

from fp8_dist.kernels.cpu import blocks, gemm, quantization, scale

__all__ = ["blocks", "gemm", "quantization", "scale"]
