"""Amaxes, row amaxes or casts of many tensors, each in one launch.

A kernel finds the tensors in a table on the device, with a row of int64 for each. The table is
copied there once for the same tensors, because the shards of weights keep their addresses.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton.casts import quantize
from fp8_dist.kernels.cuda.triton.launch import (
    as_matrix,
    blocks,
    float8_constants,
    programs,
    size_class,
    tuned,
)
from fp8_dist.kernels.cuda.triton.reductions import amax
from fp8_dist.kernels.cuda.triton.rounding import (
    indices,
    load_tile,
    magnitude,
    saturated,
    store_tile,
    to_float8,
)

TRITON = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


@tuned(blocks(4, BLOCK=2048), blocks(8, BLOCK=4096))
@triton.jit
def _many(
    table: tl.tensor,
    out: tl.tensor,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # One instance: one of SPLITS parts of one tensor, whose address and size are in the table.
    # Moves the bytes of all tensors once.
    tensor = tl.program_id(0)
    x = tl.load(table + 2 * tensor).to(tl.pointer_type(DTYPE))
    size = tl.load(table + 2 * tensor + 1)
    if ALIGNED:
        x = tl.multiple_of(x, 16)
        size = tl.multiple_of(size, 16)
    largest = tl.zeros([BLOCK], tl.int32)
    for block in range(tl.program_id(1), tl.cdiv(size, BLOCK), SPLITS):
        n = indices(block, BLOCK)
        largest = tl.maximum(largest, magnitude(tl.load(x + n, mask=n < size, other=0.0)))
    tl.atomic_max(out + tensor, tl.max(largest, 0), sem="relaxed")


@tuned(
    blocks(4, BM=4, BN=1024),
    blocks(4, BM=8, BN=256),
    blocks(8, BM=16, BN=256),
    blocks(8, BM=2, BN=2048),
)
@triton.jit
def _rows_of_many(
    table: tl.tensor,
    out: tl.tensor,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: every SPLITS-th block of BM rows of one matrix. The table has its address, its
    # sizes, and the index of its first row in out. Moves the bytes of all tensors once.
    entry = table + 4 * tl.program_id(0)
    x = tl.load(entry).to(tl.pointer_type(DTYPE))
    M, K, first = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    if ALIGNED:
        x = tl.multiple_of(x, 16)
        K = tl.multiple_of(K, 16)
    for block in range(tl.program_id(1), tl.cdiv(M, BM), SPLITS):
        i = indices(block, BM)
        largest = tl.zeros([BM, BN], tl.int32)
        for part in range(tl.cdiv(K, BN)):
            j = indices(part, BN)
            largest = tl.maximum(largest, magnitude(load_tile(x, i, j, M, K, K, 1)))
        tl.store(out + first + i, tl.max(largest, 1), mask=i < M)


@tuned(
    blocks(4, BM=4, BN=1024),
    blocks(4, BM=8, BN=512),
    blocks(8, BM=16, BN=256),
    blocks(8, BM=4, BN=2048),
)
@triton.jit
def _cast_many(
    table: tl.tensor,
    multipliers: tl.tensor,
    out: tl.tensor,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    OF_ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    SOFT: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: every SPLITS-th block of BM rows of one matrix. The table has its address, its
    # sizes, the index of its first multiplier, and that of its first byte in out. Moves the bytes
    # of all tensors once, and 1 byte per element.
    entry = table + 5 * tl.program_id(0)
    x = tl.load(entry).to(tl.pointer_type(DTYPE))
    M, K = tl.load(entry + 1), tl.load(entry + 2)
    first, start = tl.load(entry + 3), tl.load(entry + 4)
    if ALIGNED:
        x = tl.multiple_of(x, 16)
        K = tl.multiple_of(K, 16)
        start = tl.multiple_of(start, 16)
    for block in range(tl.program_id(1), tl.cdiv(M, BM), SPLITS):
        i = indices(block, BM)
        m = tl.load(multipliers + first + i * OF_ROWS, mask=i < M, other=1.0)
        for part in range(tl.cdiv(K, BN)):
            j = indices(part, BN)
            v = saturated(load_tile(x, i, j, M, K, K, 1) * m[:, None], BIAS)
            store_tile(out + start, to_float8(v, BIAS, SOFT), i, j, M, K)


def amaxes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Amax of each of many contiguous tensors of one dtype and device: fp32 ``[len(tensors)]``.

    Two launches; 2 bytes per bf16 element. The tensors' addresses are copied to the device, and the
    host waits for the copy, unless they are the same as in recent calls. While a CUDA graph is
    captured, the tensors are processed one by one, because the graph would outlive the addresses.
    """
    device, dtype = tensors[0].device, tensors[0].dtype
    if is_capturing(device):
        return torch.stack([amax(t) for t in tensors])
    addresses, sizes = addresses_of(tensors), [t.numel() for t in tensors]
    out = torch.zeros(len(tensors), dtype=torch.float32, device=device)
    splits = min(256, programs(max(sizes), 2**15))
    _many(
        lambda chosen: (len(tensors), splits),
        (dtype, size_class(len(tensors), max(sizes))),
        device,
        *(table_on(device, addresses, sizes), out.view(torch.int32)),
        DTYPE=TRITON[dtype],
        ALIGNED=are_aligned(addresses, sizes),
        SPLITS=splits,
    )
    return out


def row_amaxes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Amaxes of the rows of many contiguous tensors of one dtype and device: fp32, flat.

    The rows of each tensor follow those of the previous one. One launch, and a copy of addresses as
    in :func:`amaxes`; 2 bytes per bf16 element.
    """
    matrices = [as_matrix(t) for t in tensors]
    device, dtype = tensors[0].device, tensors[0].dtype
    if is_capturing(device):
        return torch.cat([amax(t, [1]).view(-1) for t in matrices])
    addresses, rows, columns = addresses_of(matrices), *_sizes(matrices)
    out = torch.empty(sum(rows), dtype=torch.float32, device=device)
    splits = min(256, programs(max(rows), 32))
    _rows_of_many(
        lambda chosen: (len(matrices), splits),
        (dtype, size_class(len(matrices), max(rows), max(columns))),
        device,
        table_on(device, addresses, rows, columns, starts_of(rows)),
        out.view(torch.int32),
        DTYPE=TRITON[dtype],
        ALIGNED=are_aligned(addresses, columns),
        SPLITS=splits,
    )
    return out


def quantize_many(
    tensors: Sequence[torch.Tensor], multipliers: torch.Tensor, dtype: torch.dtype, of_rows: bool
) -> torch.Tensor:
    """:func:`fp8_dist.kernels.quantize` of many contiguous tensors of one dtype and device, flat.

    Args:
        tensors: bf16, fp16 or fp32.
        multipliers: fp32, contiguous, flat: one for each tensor, or for each row of each.
        dtype: a float8 dtype.
        of_rows: whether there is a multiplier for each row.

    One launch, and a copy of addresses as in :func:`amaxes`; 3 bytes per bf16 element. The tensors
    are cast one by one while a CUDA graph is captured.
    """
    matrices, device = [as_matrix(t) for t in tensors], tensors[0].device
    addresses, rows, columns = addresses_of(matrices), *_sizes(matrices)
    out = torch.empty(sum(t.numel() for t in matrices), dtype=dtype, device=device)
    firsts = starts_of(rows) if of_rows else list(range(len(rows)))
    starts = starts_of([t.numel() for t in matrices])
    if is_capturing(device):
        for matrix, first, start in zip(matrices, firsts, starts, strict=True):
            mine = multipliers[first : first + len(matrix) if of_rows else first + 1].view(-1, 1)
            qdata = quantize(matrix, mine if of_rows else mine.view(()), dtype).qdata
            assert qdata is not None
            out[start : start + matrix.numel()].copy_(qdata.view(-1))
        return out
    splits = min(256, programs(max(rows), 32))
    _cast_many(
        lambda chosen: (len(matrices), splits),
        (matrices[0].dtype, size_class(len(matrices), max(rows), max(columns)), of_rows),
        device,
        table_on(device, addresses, rows, columns, firsts, starts),
        *(multipliers, out.view(torch.uint8)),
        DTYPE=TRITON[matrices[0].dtype],
        ALIGNED=are_aligned(addresses, columns, starts),
        OF_ROWS=int(of_rows),
        SPLITS=splits,
        **float8_constants(dtype, device),
    )
    return out


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Addresses of contiguous tensors of one dtype and device."""
    first = tensors[0]
    for t in tensors:
        assert t.is_contiguous()
        assert (t.dtype, t.device) == (first.dtype, first.device)
    return [t.data_ptr() for t in tensors]


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, which would outlive the addresses in a table."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def are_aligned(*numbers: list[int]) -> bool:
    """Whether all numbers are multiples of 16."""
    return all(n % 16 == 0 for each in numbers for n in each)


def _sizes(matrices: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    return [t.shape[0] for t in matrices], [t.shape[1] for t in matrices]


def starts_of(sizes: list[int]) -> list[int]:
    """Start of each of several consecutive pieces of the given sizes."""
    return list(accumulate(sizes, initial=0))[:-1]


def table_on(device: torch.device, *columns: list[int]) -> torch.Tensor:
    """Table of int64 on the device, given by its columns."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return _table_of(tuple(zip(*columns, strict=True)), device, stream)


@lru_cache(maxsize=16)
def _table_of(
    rows: tuple[tuple[int, ...], ...], device: torch.device, stream: torch.cuda.Stream | None
) -> torch.Tensor:
    # One table per stream: the memory of a dropped table is reused on that stream only.
    return torch.tensor(rows, dtype=torch.int64).to(device)
