"""The GEMM of operands with block scales (:mod:`fp8_dist.kernels.blocks`)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8_dist.kernels.blocks import powers_of_2, scaled_by
from fp8_dist.kernels.custom_op import custom_op


@custom_op(
    "dequantize_blocks(Tensor x, Tensor exponents, int[] blocks, ScalarType dtype) -> Tensor"
)
def dequantize_blocks(
    x: Tensor, exponents: Tensor, blocks: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Multiply float8 data by its block scales, in a wider dtype.

    The result has the memory layout of ``x``. It is exact, except for values that are subnormal in
    bf16.
    """
    return dequantized_with(Tensor.to, x, exponents, blocks, dtype)


def dequantized_with(
    upcast: Callable[[Tensor, torch.dtype], Tensor],
    x: Tensor,
    exponents: Tensor,
    blocks: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Implement :func:`dequantize_blocks` with the given conversion to the wider dtype."""
    if is_transposed(x):
        turned = transposed_blocks(blocks)
        return dequantized_with(upcast, x.t(), exponents.t(), turned, dtype).t()
    return scaled_by(upcast(x, dtype), powers_of_2(exponents), blocks)


def is_transposed(x: Tensor) -> bool:
    """Return whether a matrix has contiguous columns in memory, and no contiguous rows."""
    return x.ndim == 2 and not x.is_contiguous() and x.t().is_contiguous()


def transposed_blocks(blocks: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the blocks of a matrix's transpose."""
    rows, columns, first_row, first_column = blocks
    return columns, rows, first_column, first_row


@custom_op(
    "block_scaled_mm(Tensor a, Tensor b, Tensor exponents_a, Tensor exponents_b, int[] blocks_a, "
    "int[] blocks_b, ScalarType out_dtype, bool emulate) -> Tensor",
    fake=lambda a, b, exponents_a, exponents_b, blocks_a, blocks_b, out_dtype, emulate: a.new_empty(
        (a.shape[0], b.shape[1]), dtype=out_dtype
    ),
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
    """Multiply local float8 matrices with block scales.

    If the device has no GEMM for them, the matrices are converted to a wider type, in which the
    product of two values is exact: to bf16 for a bf16 result, with sums in fp32, and to fp32 for
    other results.

    Args:
        a: float8, ``[M, K]``, any strides.
        b: float8, ``[K, N]``, any strides.
        exponents_a, exponents_b: the exponents of the blocks of ``a`` and of ``b``.
        blocks_a, blocks_b: the blocks of ``a`` and of ``b``, see :mod:`fp8_dist.kernels.blocks`.
        out_dtype: dtype of the result.
        emulate: compute in a wider type even on devices with such a GEMM.

    Returns:
        ``[M, N]``, contiguous.
    """
    wide = torch.bfloat16 if out_dtype is torch.bfloat16 else torch.float32
    left = dequantize_blocks(a, exponents_a, blocks_a, wide)
    right = dequantize_blocks(b, exponents_b, blocks_b, wide)
    with torch.autocast(a.device.type, enabled=False):
        return torch.mm(left, right).to(out_dtype)


@custom_op("gemm_scales(Tensor a, Tensor b, int multiple=1) -> (Tensor, Tensor)")
def gemm_scales(a: Tensor, b: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Convert the exponents of two operands to scales in the layout that Hopper's GEMM reads.

    Args:
        a, b: the exponents of each operand, ``[R, C]``, any strides.
        multiple: pad the scales of ``b`` with rows of zeros to a multiple of this.

    Returns:
        The scales of ``a`` and of ``b``, fp32 ``[R, C]`` (R of ``b`` is padded) with strides
        ``(1, R)``.
    """
    of_b = pad(powers_of_2(b), (0, 0, 0, -len(b) % multiple))
    return powers_of_2(a).t().contiguous().t(), of_b.t().contiguous().t()


@custom_op("tiled_exponents(Tensor a, Tensor b, int repeats=1) -> (Tensor, Tensor)")
def tiled_exponents(a: Tensor, b: Tensor, repeats: int = 1) -> tuple[Tensor, Tensor]:
    """Copy the exponents of two operands to the layout that Blackwell's GEMM reads.

    The results are flat. They consist of tiles of 128 x 4 exponents, padded with zeros. A tile has
    32 rows of 16 bytes. Row i has the 4 bytes of each of the exponents' rows i, i + 32, i + 64 and
    i + 96.

    Args:
        a, b: the exponents of each operand, ``[R, C]``, any strides.
        repeats: number of times that each row of ``b`` is repeated.
    """
    return _in_tiles(a), _in_tiles(b.repeat_interleave(repeats, dim=0))


def _in_tiles(exponents: Tensor) -> Tensor:
    rows, columns = exponents.shape
    padded = pad(exponents, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
