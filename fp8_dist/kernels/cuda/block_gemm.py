"""The GEMM with block scales, on devices that have one.

* Hopper multiplies blocks of 1 x 128 by blocks of 128 x 128 or of 1 x 128, with fp32 scales.
* Blackwell multiplies blocks of 1 x 32 (MX), with e8m0 scales in tiles of 128 x 4.

The layouts follow the checks of torch's ``scaled_mm``.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from fp8_dist.kernels import cuda
from fp8_dist.kernels.gemm import row_major
from fp8_dist.kernels.transposing import transposed_copy

_BLOCK = {"hopper": 128, "blackwell": 32}
_ALIGNED = 16  # elements; float8 matrix cores load 16-byte vectors


@cache
def device_kind(device: torch.device) -> str | None:
    """The GEMM that a device has: "hopper", "blackwell" or None."""
    if torch.version.cuda is None:
        return None
    release = tuple(map(int, torch.version.cuda.split(".")[:2]))
    major, _ = torch.cuda.get_device_capability(device)
    if major == 9 and release >= (12, 9):
        return "hopper"
    return "blackwell" if major == 10 and release >= (12, 8) else None


def block_mm(
    a: Tensor,
    b: Tensor,
    exponents_a: Tensor,
    exponents_b: Tensor,
    blocks_a: Sequence[int],
    blocks_b: Sequence[int],
    out_dtype: torch.dtype,
    transpose: Callable[[Tensor], Tensor] = transposed_copy,
) -> Tensor | None:
    """:func:`fp8_dist.kernels.block_scaled_mm`, or None if the device has no GEMM for the operands.

    ``transpose`` makes the transposed copies that the GEMM needs.
    """
    kind = device_kind(a.device)
    if kind is None or not _fits(_BLOCK[kind], a, b, blocks_a, blocks_b, out_dtype):
        return None
    rows, columns = a.shape[0], b.shape[1]
    a = row_major(_in_whole_blocks(a, blocks_a), transpose)
    b = row_major(_in_whole_blocks(b, blocks_b).t(), transpose).t()
    operands = _hopper_scales if kind == "hopper" else _blackwell_scales
    run = operands(a, b, exponents_a, exponents_b, blocks_b)
    product = run(a, b, out_dtype)
    first = blocks_b[3]
    return product[:rows, first : first + columns].contiguous()


def _fits(
    block: int,
    a: Tensor,
    b: Tensor,
    blocks_a: Sequence[int],
    blocks_b: Sequence[int],
    out_dtype: torch.dtype,
) -> bool:
    """Whether the GEMM supports the operands; their blocks must begin alike in the contraction."""
    rows, columns, _, first = blocks_a
    others_rows, others_columns, others_first, _ = blocks_b
    return (
        a.dtype is b.dtype is torch.float8_e4m3fn
        and out_dtype in (torch.bfloat16, torch.float32)
        and (rows, columns, others_rows) == (1, block, block)
        and others_columns in (1, block)
        and first == others_first
        and min(*a.shape, *b.shape) > 0
        and not (a.shape[0] % _ALIGNED or b.shape[1] % _ALIGNED)
    )


def _in_whole_blocks(x: Tensor, blocks: Sequence[int]) -> Tensor:
    """Pad a matrix with zeros to whole blocks."""
    rows, columns, first_row, first_column = blocks
    missing = (
        first_column,
        -(first_column + x.shape[1]) % columns,
        first_row,
        -(first_row + x.shape[0]) % rows,
    )
    if not any(missing):
        return x
    return pad(x.view(torch.uint8), missing).view(x.dtype)  # torch does not pad float8 data


class _Run:
    """torch's GEMM with its scales bound, to be called with the operands and the result's dtype."""

    def __init__(self, scale_a: Tensor, kind_a: Any, scale_b: Tensor, kind_b: Any, swizzle: bool):
        how = SwizzleType.SWIZZLE_32_4_4 if swizzle else SwizzleType.NO_SWIZZLE
        self._mm: Callable[..., Tensor] = partial(
            scaled_mm,
            scale_a=scale_a,
            scale_recipe_a=kind_a,
            scale_b=scale_b,
            scale_recipe_b=kind_b,
            swizzle_a=how,
            swizzle_b=how,
        )

    def __call__(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return self._mm(a, b, output_dtype=out_dtype)


def _hopper_scales(
    a: Tensor, b: Tensor, exponents_a: Tensor, exponents_b: Tensor, blocks_b: Sequence[int]
) -> _Run:
    """Bind scales of rows, ``[M, K / 128]``, and of columns, ``[N, K / 128]``, or squares.

    Scales of squares are ``[L, N / 128]``, with L ``K / 128`` rounded up to a multiple of 4. The
    first dim of all is contiguous in memory.
    """
    if blocks_b[1] == 1:
        of_a, of_b = cuda.gemm_scales(exponents_a, exponents_b.t())
        return _Run(of_a, ScalingType.BlockWise1x128, of_b, ScalingType.BlockWise1x128, False)
    of_a, of_b = cuda.gemm_scales(exponents_a, exponents_b, 4)
    return _Run(of_a, ScalingType.BlockWise1x128, of_b, ScalingType.BlockWise128x128, False)


def _blackwell_scales(
    a: Tensor, b: Tensor, exponents_a: Tensor, exponents_b: Tensor, blocks_b: Sequence[int]
) -> _Run:
    """Bind tiled exponents of rows and columns. Those of squares are repeated for each column."""
    tiles = cuda.tiled_exponents(exponents_a, exponents_b.t(), blocks_b[1])
    of_a, of_b = (each.view(torch.float8_e8m0fnu) for each in tiles)
    return _Run(of_a, ScalingType.BlockWise1x32, of_b, ScalingType.BlockWise1x32, True)
