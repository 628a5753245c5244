"""Kernels for GPUs: fused casts in Triton, and float8 GEMMs with the layouts that they read.

Importing this package registers implementations of the operators of :mod:`fp8_dist.kernels`. Casts
need Triton, which PyTorch installs on Linux with CUDA. Without it they use the portable
implementations.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from fp8_dist.kernels.blocks import quantize_block_copies
from fp8_dist.kernels.cuda import gemm as gemm
from fp8_dist.kernels.encoding import encode_float8
from fp8_dist.kernels.quantization import quantize
from fp8_dist.text import warn_once

HAS_TRITON = find_spec("triton") is not None


def _without_triton(portable: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    warn_once(
        "no Triton",
        "fp8_dist: there is no Triton in this environment; casts to float8 use torch's operators, "
        "which move several times as many bytes. pip install triton (the release that torch's own "
        "metadata names)",
    )
    return portable(*args, **kwargs)


if HAS_TRITON:
    from fp8_dist.kernels.cuda import triton as triton
else:
    for op in (quantize, quantize_block_copies, encode_float8):
        # All portable casts call one of these.
        op.register("cuda", partial(_without_triton, op.portable))
