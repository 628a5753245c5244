"""Kernels for CPUs, which have no float8 arithmetic: exact and fast emulation.

Importing this package registers implementations of the operators of :mod:`fp8_dist.kernels`.
Amaxes, scales and casts have the same bits as in the portable implementations. The GEMMs are more
exact.
"""

from fp8_dist.kernels.cpu import casts, gemm

__all__ = ["casts", "gemm"]
