"""Maximum of absolute values of a tensor, of its rows or of its columns.

Each is the maximum of the bits of ``|x|`` as integers, which keeps a NaN. A result that several
program instances share is filled with zeros first, which is another launch.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton.launch import (
    as_matrix,
    blocks,
    programs,
    size_class,
    tuned,
)
from fp8_dist.kernels.cuda.triton.rounding import indices, load_tile, magnitude
from fp8_dist.kernels.cuda.zeros import zero

_STEPS = 8  # blocks that one instance reads for an amax of a tensor or of columns


@tuned(blocks(4, BLOCK=2048), blocks(8, BLOCK=4096), blocks(8, BLOCK=8192))
@triton.jit
def _whole(
    x: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    columns: tl.tensor,
    stride_m: tl.tensor,
    stride_k: tl.tensor,
    CONTIGUOUS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # One instance: STEPS * BLOCK elements. Moves the bytes of x once.
    largest = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        n = indices(tl.cast(tl.program_id(0), tl.int64) * STEPS + step, BLOCK)
        offsets = n if CONTIGUOUS else n // columns * stride_m + n % columns * stride_k
        largest = tl.maximum(largest, magnitude(tl.load(x + offsets, mask=n < size, other=0.0)))
    tl.atomic_max(out, tl.max(largest, 0), sem="relaxed")


@tuned(
    blocks(4, BM=8, BN=256),
    blocks(4, BM=4, BN=1024),
    blocks(8, BM=16, BN=256),
    blocks(8, BM=2, BN=2048),
)
@triton.jit
def _rows(
    x: tl.tensor,
    out: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    stride_m: tl.tensor,
    stride_k: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: BM rows. Moves the bytes of x once.
    i = indices(tl.program_id(0), BM)
    largest = tl.zeros([BM, BN], tl.int32)
    for block in range(tl.cdiv(K, BN)):
        j = indices(block, BN)
        largest = tl.maximum(largest, magnitude(load_tile(x, i, j, M, K, stride_m, stride_k)))
    tl.store(out + i, tl.max(largest, 1), mask=i < M)


@tuned(blocks(4, BM=32, BN=64), blocks(4, BM=16, BN=128), blocks(8, BM=32, BN=128))
@triton.jit
def _columns(
    x: tl.tensor,
    out: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    stride_m: tl.tensor,
    stride_k: tl.tensor,
    STEPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: BN columns of STEPS * BM rows. Moves the bytes of x once.
    j = indices(tl.program_id(1), BN)
    largest = tl.zeros([BM, BN], tl.int32)
    for step in range(STEPS):
        i = indices(tl.cast(tl.program_id(0), tl.int64) * STEPS + step, BM)
        largest = tl.maximum(largest, magnitude(load_tile(x, i, j, M, K, stride_m, stride_k)))
    tl.atomic_max(out + j, tl.max(largest, 0), mask=j < K, sem="relaxed")


def amax(x: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    """:func:`fp8_dist.kernels.amax` of a tensor, of its rows or of its columns.

    Args:
        x: bf16, fp16 or fp32, any strides. Any shape for ``None``, otherwise ``[M, K]``.
        dims: ``None`` reduces to a 0-dim tensor, ``[1]`` to ``[M, 1]``, ``[0]`` to ``[1, K]``.

    One launch, two for columns; 2 bytes per bf16 element.
    """
    if dims is None:
        return _amax_of_tensor(x)
    (dim,) = dims
    # If columns are contiguous, read the rows of the transpose.
    if x.stride(0) == 1 and x.stride(1) != 1:
        return _amax_along(x.t(), 1 - dim).t()
    return _amax_along(x, dim)


def _amax_of_tensor(x: torch.Tensor) -> torch.Tensor:
    x = as_matrix(x)
    contiguous = x.is_contiguous()
    if not contiguous and x.stride(0) < x.stride(1):
        x = x.t()
        contiguous = x.is_contiguous()
    device, size = x.device, x.numel()
    out = zero(device)
    _whole(
        lambda chosen: (programs(size, chosen["BLOCK"] * _STEPS),),
        (x.dtype, size_class(size), contiguous),
        device,
        *(x, out.view(torch.int32), size, max(1, x.shape[1]), *x.stride()),
        CONTIGUOUS=contiguous,
        STEPS=_STEPS,
    )
    return out


def _amax_along(x: torch.Tensor, dim: int) -> torch.Tensor:
    M, K = x.shape
    key = (x.dtype, size_class(M, K), x.stride(1) == 1)
    if dim == 1:
        out = torch.empty(M, 1, dtype=torch.float32, device=x.device)
        _rows(
            lambda chosen: (programs(M, chosen["BM"]),),
            key,
            x.device,
            *(x, out.view(torch.int32), M, K, *x.stride()),
        )
        return out
    out = torch.zeros(1, K, dtype=torch.float32, device=x.device)
    _columns(
        lambda chosen: (programs(M, chosen["BM"] * _STEPS), programs(K, chosen["BN"])),
        key,
        x.device,
        *(x, out.view(torch.int32), M, K, *x.stride()),
        STEPS=_STEPS,
    )
    return out
