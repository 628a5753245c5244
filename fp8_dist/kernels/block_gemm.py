"""The GEMM of operands with scales of blocks (:mod:`fp8_dist.kernels.blocks`)."""

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
    """float8 data times the scales of its blocks, in a wider dtype, which holds it exactly.

    (But for the ends of the range of bf16: subnormal numbers.)
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
    """The product of local float8 matrices with scales of blocks.

    Where the device has no GEMM for them it is computed in a wider type, in which each product of
    two values is exact: bf16 for a bf16 result, which accumulates in fp32, and fp32 for others.

    Args:
        a: float8, ``[M, K]``, any strides.
        b: float8, ``[K, N]``, any strides.
        exponents_a, exponents_b: of their blocks.
        blocks_a, blocks_b: what these are.
        out_dtype: of the result.
        emulate: compute in a wider type in any case.

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
