"""The GEMM of operands with block scales (:mod:`fp8_dist.kernels.blocks`)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp8_dist.kernels.blocks import powers_of_2, scaled_by
from fp8_dist.kernels.custom_op import custom_op


def dequantized(
    x: Tensor,
    exponents: Tensor,
    blocks: Sequence[int],
    dtype: torch.dtype,
    upcast: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to,
) -> Tensor:
    """Float8 data times its block scales, in a wider dtype.

    The result is exact, except for subnormal numbers of bf16.
    """
    if x.ndim == 2 and not x.is_contiguous() and x.t().is_contiguous():
        rows, columns, first_row, first_column = blocks
        turned = (columns, rows, first_column, first_row)
        return dequantized(x.t(), exponents.t(), turned, dtype, upcast).t()
    return scaled_by(upcast(x, dtype), powers_of_2(exponents), blocks)


@custom_op(
    "block_scaled_mm(Tensor a, Tensor b, Tensor exponents_a, Tensor exponents_b, int[] blocks_a, "
    "int[] blocks_b, ScalarType out_dtype, bool emulate) -> Tensor"
)
def block_scaled_mm(
    a: Tensor,
    b: Tensor,
    exponents_a: Tensor,
    exponents_b: Tensor,
    blocks_a: Sequence[int],
    blocks_b: Sequence[int],
    out_dtype: torch.dtype,
    emulate: bool,
) -> Tensor:
    """Product of local float8 matrices with block scales.

    If the device has no GEMM for them, the product is computed in a wider type, in which each
    product of two values is exact: bf16 for a bf16 result, which accumulates in fp32, and fp32 for
    other results.

    Args:
        a: float8, ``[M, K]``, any strides.
        b: float8, ``[K, N]``, any strides.
        exponents_a, exponents_b: exponents of their blocks.
        blocks_a, blocks_b: their blocks, see :mod:`fp8_dist.kernels.blocks`.
        out_dtype: dtype of the result.
        emulate: compute in a wider type even on devices with such a GEMM.

    Returns:
        ``[M, N]``, contiguous.
    """
    wide = torch.bfloat16 if out_dtype is torch.bfloat16 else torch.float32
    left = dequantized(a, exponents_a, blocks_a, wide)
    right = dequantized(b, exponents_b, blocks_b, wide)
    with torch.autocast(a.device.type, enabled=False):
        return torch.mm(left, right).to(out_dtype)


@block_scaled_mm.register_fake
def _block_scaled_mm_fake(
    a: Tensor,
    b: Tensor,
    exponents_a: Tensor,
    exponents_b: Tensor,
    blocks_a: Sequence[int],
    blocks_b: Sequence[int],
    out_dtype: torch.dtype,
    emulate: bool,
) -> Tensor:
    return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
