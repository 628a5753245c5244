"""Scales of rows and columns of a product in fp32, where the GEMM itself takes none."""

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton.launch import blocks, fused, size_class, tiles, tuned
from fp8_dist.kernels.cuda.triton.rounding import indices
from fp8_dist.kernels.gemm import scale_product


# It changes the product in place, so a second choice could not be measured on the arguments.
@tuned(blocks(4, BM=8, BN=512))
@triton.jit
def _scale_product(
    product: tl.tensor,
    scale_a: tl.tensor,
    stride_a: tl.tensor,
    scale_b: tl.tensor,
    stride_b: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN]. Moves 8 bytes per element.
    i = indices(tl.program_id(0), BM)[:, None]
    j = indices(tl.program_id(1), BN)[None, :]
    a = tl.load(scale_a + i * stride_a, mask=i < M, other=1.0)
    b = tl.load(scale_b + j * stride_b, mask=j < N, other=1.0)
    mask, places = (i < M) & (j < N), product + i * N + j
    tl.store(places, tl.load(places, mask=mask, other=0.0) * a * b, mask=mask)


@fused(scale_product, lambda product, *_: product.dtype is torch.float32)
def _scaled(product: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> None:
    """Scale a product in one launch; 8 bytes per element."""
    M, N = product.shape
    rows, columns = scale_a.expand(M, 1), scale_b.expand(1, N)
    _scale_product(
        tiles(M, N),
        (size_class(M, N),),
        product.device,
        *(product, rows, rows.stride(0), columns, columns.stride(1), M, N),
    )
