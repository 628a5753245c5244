"""Local computation on float8 data: amax, scale, cast, scaled GEMM.

Plain tensors in, plain tensors out. A kernel knows no mesh, no config and no layer. Below this room
are dtypes and the doors to torch's private names alone.
"""
