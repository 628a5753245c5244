"""A transposing copy of float8 data, such as a gathered weight: tile by tile."""

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton.launch import blocks, programs, size_class, tuned
from fp8_dist.kernels.cuda.triton.rounding import indices, store_tile


@tuned(blocks(4, BM=64, BN=64), blocks(4, BM=128, BN=64), blocks(8, BM=128, BN=128))
@triton.jit
def _transpose(
    x: tl.tensor,
    out: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    stride_m: tl.tensor,
    stride_k: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: a tile of [BM, BN]. Moves 2 bytes per element.
    i = indices(tl.program_id(0), BM)
    j = indices(tl.program_id(1), BN)
    mask = (i[:, None] < M) & (j[None, :] < K)
    tile = tl.load(x + i[:, None] * stride_m + j[None, :] * stride_k, mask=mask, other=0)
    store_tile(out, tl.trans(tile), j, i, K, M)


def transpose(x: torch.Tensor) -> torch.Tensor:
    """``x.t().contiguous()`` of a matrix ``[M, K]`` with elements of one byte, any strides.

    One launch; 2 bytes per element.
    """
    M, K = x.shape
    out = torch.empty(K, M, dtype=torch.uint8, device=x.device)
    _transpose(
        lambda chosen: (programs(M, chosen["BM"]), programs(K, chosen["BN"])),
        (size_class(M, K), x.stride(1) == 1),
        x.device,
        *(x.view(torch.uint8), out, M, K, *x.stride()),
    )
    return out.view(x.dtype)
