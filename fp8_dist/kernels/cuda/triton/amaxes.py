"""Amaxes of a tensor, of its rows or columns, or of many tensors.

Each amax is the maximum of the bits of ``|x|`` as integers, which keeps a NaN. If several program
instances reduce into one amax, it is filled with zeros by a launch before.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl

from fp8_dist.device import current_capture, current_stream
from fp8_dist.kernels.cuda.triton import launch, rounding, tiles
from fp8_dist.kernels.cuda.triton.launch import DTYPES, OF_ROWS, STEPS, STRIPES
from fp8_dist.kernels.quantization import as_matrix
from fp8_dist.kernels.scale import amax, amax_of_tensors, amaxes, covered_dims, empty_amax
from fp8_dist.torch_internals import foreach_zero_, normal_tensors


@launch.kernel(**OF_ROWS)
@triton.jit
def _rows(x: tl.tuple, out: tl.tensor, BM: tl.constexpr, BN: tl.constexpr) -> None:
    # One instance: BM rows. Moves the bytes of x once.
    i = tiles.indices(tl.program_id(0), BM)
    largest = tl.zeros([BM, BN], tl.int32)
    for block in range(tl.cdiv(x[2], BN)):
        tile = tiles.load(x, i, tiles.indices(block, BN))
        largest = tl.maximum(largest, rounding.magnitude(tile))
    tl.store(out + i, tl.max(largest, 1), mask=i < x[1])


@launch.kernel(**STRIPES)
@triton.jit
def _tiles(
    x: tl.tuple,
    rows: tl.tensor | None,
    columns: tl.tensor | None,
    whole: tl.tensor | None,
    STEPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: the part of STEPS * BM rows in BN columns. Moves the bytes of x once.
    # The outputs are int32, and begin as zeros.
    j = tiles.indices(tl.program_id(1), BN)
    largest = tl.zeros([BM, BN], tl.int32)
    for step in range(STEPS):
        i = tiles.indices(tl.cast(tl.program_id(0), tl.int64) * STEPS + step, BM)
        bits = rounding.magnitude(tiles.load(x, i, j))
        if rows is not None:
            tl.atomic_max(rows + i, tl.max(bits, 1), mask=i < x[1], sem="relaxed")
        largest = tl.maximum(largest, bits)
    column_amaxes = tl.max(largest, 0)
    if columns is not None:
        tl.atomic_max(columns + j, column_amaxes, mask=j < x[2], sem="relaxed")
    if whole is not None:
        tl.atomic_max(whole, tl.max(column_amaxes, 0), sem="relaxed")


@triton.jit
def entry_of(table: tl.tensor, DTYPE: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tuple:
    """Read the entry of a program instance's tensor in a table (:func:`table_of`)."""
    entry = table + 5 * tl.program_id(0)
    x = tl.load(entry).to(tl.pointer_type(DTYPE))
    K, begin = tl.load(entry + 2), tl.load(entry + 4)
    if ALIGNED:
        x = tl.multiple_of(x, 16)
        K = tl.multiple_of(K, 16)
        begin = tl.multiple_of(begin, 16)
    return x, tl.load(entry + 1), K, tl.load(entry + 3), begin


@launch.kernel(**OF_ROWS)
@triton.jit
def _many(
    table: tl.tensor,
    out: tl.tensor,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    OF_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    # One instance: every SPLITS-th block of BM rows of one matrix of the table (table_of). Moves
    # the bytes of all tensors once.
    x, M, K, first, _ = entry_of(table, DTYPE, ALIGNED)
    for block in range(tl.program_id(1), tl.cdiv(M, BM), SPLITS):
        i = tiles.indices(block, BM)
        largest = tl.zeros([BM, BN], tl.int32)
        for part in range(tl.cdiv(K, BN)):
            tile = tiles.load((x, M, K, K, 1), i, tiles.indices(part, BN))
            largest = tl.maximum(largest, rounding.magnitude(tile))
        rows = tl.max(largest, 1)
        if OF_ROWS:
            tl.store(out + first + i, rows, mask=i < M)
        else:
            tl.atomic_max(out + first, tl.max(rows, 0), sem="relaxed")


def _takes(x: torch.Tensor, dims: Sequence[int] | None = None) -> bool:
    if x.ndim < 2:  # one row; a grid has at most 65,535 tiles along it
        return x.dtype in DTYPES and dims is None and x.numel() < 2**25
    names = ("tensor", "row", "column", "matrix")[: 4 if x.numel() else 3]
    along = [covered_dims(name, x.ndim) for name in names]
    return x.dtype in DTYPES and (None if dims is None else tuple(dims)) in along


@launch.fused(amax, _takes)
def find_amax(x: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
    """Compute an amax in two launches, one for rows; 2 bytes per bf16 element."""
    return amax_of_matrix(x, dims, launch.matrix(x))


def amax_of_matrix(
    x: torch.Tensor, dims: Sequence[int] | None, matrix: launch.Matrix
) -> torch.Tensor:
    """Compute :func:`find_amax`, given ``x`` as an argument of a kernel."""
    if dims is not None and tuple(dims) == covered_dims("matrix", x.ndim):
        of_rows = amax_of_matrix(x, covered_dims("row", x.ndim), matrix)
        return of_rows.amax(-2, keepdim=True)
    data, M, K, stride_m, stride_k = matrix
    by_row = dims is not None and tuple(dims) == covered_dims("row", x.ndim)
    # If columns are contiguous in memory, read the rows of the transpose instead.
    if stride_m == 1 and stride_k != 1:
        M, K, stride_m, stride_k = K, M, stride_k, stride_m
        by_row = dims is not None and not by_row
    argument = data, M, K, stride_m, stride_k
    kind = launch.kind_of_call(x, dims is None)
    if by_row:
        bits = empty_amax(x, dims).view(torch.int32)
        _rows.repeat(kind, _rows.tiles(M), argument, bits)
        return bits.view(torch.float32)

    grid = _tiles.tiles(M, K, steps=STEPS)
    if dims is None:
        bits = torch.zeros((), dtype=torch.int32, device=x.device)
        _tiles.repeat(kind, grid, argument, None, None, bits, STEPS=STEPS)
    else:
        bits = empty_amax(x, dims).zero_().view(torch.int32)
        _tiles.repeat(kind, grid, argument, None, bits, None, STEPS=STEPS)
    return bits.view(torch.float32)


@launch.fused(amaxes, lambda x, covers: x.dtype in DTYPES and x.ndim > 1)
def _amaxes(x: torch.Tensor, covers: Sequence[str]) -> list[torch.Tensor]:
    """Compute amaxes in two launches for rows and columns; 2 bytes per bf16 element."""
    if set(covers) == {"row", "column"}:
        flat = as_matrix(x)
        M, K = flat.shape
        # Two allocations and one fill: an operator may not return two views of one buffer.
        rows, columns = (torch.empty(n, dtype=torch.int32, device=x.device) for n in flat.shape)
        foreach_zero_([rows, columns])
        _tiles(
            _tiles.tiles(M, K, steps=STEPS), launch.matrix(flat), rows, columns, None, STEPS=STEPS
        )
        results = {
            "row": rows.view(torch.float32).view(*x.shape[:-1], 1),
            "column": columns.view(torch.float32).view(*[1] * (x.ndim - 1), -1),
        }
    else:
        results = {
            name: find_amax(x, covered_dims(name, x.ndim)) for name in covers if name != "tensor"
        }
        row = results.get("row")
        results["tensor"] = find_amax(x) if row is None or not row.numel() else row.amax()
    return [results[name] for name in covers]


def are_alike(first: torch.Tensor, others: Sequence[torch.Tensor], by_row: bool = False) -> bool:
    """Return whether one launch can read all of the tensors by their addresses."""
    alike = all(x.dtype is first.dtype and x.is_contiguous() for x in others)
    return first.dtype in DTYPES and first.is_contiguous() and alike


@launch.fused(amax_of_tensors, are_alike)
def _amax_of_each(
    first: torch.Tensor, others: Sequence[torch.Tensor], by_row: bool = False
) -> torch.Tensor:
    """Copy a table, and compute amaxes in two launches, one for rows; 2 bytes per bf16 element."""
    tensors = first, *others
    counts = [math.prod(x.shape[:-1]) if by_row else 1 for x in tensors]
    allocate = torch.empty if by_row else torch.zeros
    out = allocate(sum(counts), dtype=torch.float32, device=first.device)
    grid, table, how = table_of(tensors, counts, [0] * len(tensors))
    _many(grid, table, out.view(torch.int32), OF_ROWS=by_row, **how)
    return out


def table_of(
    tensors: Sequence[torch.Tensor], counts: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[int, int], torch.Tensor, dict[str, Any]]:
    """Return a grid, a table of tensors on their device, and constants of a kernel that takes them.

    The table has one row per tensor: its address, the sizes of its matrix, the index of its first
    statistic, and where its part of the result begins, in bytes.

    Args:
        counts: how many statistics each tensor has.
        sizes: how many bytes of the result each tensor takes.
    """
    first, matrices = tensors[0], [as_matrix(x) for x in tensors]
    addresses = [x.data_ptr() for x in matrices]
    rows, columns = [x.shape[0] for x in matrices], [x.shape[1] for x in matrices]
    starts = [list(accumulate(each, initial=0))[:-1] for each in (counts, sizes)]
    table = tuple(zip(addresses, rows, columns, *starts, strict=True))
    splits = min(256, launch.programs(max(rows), 32))
    how = {
        "DTYPE": DTYPES[first.dtype],
        "ALIGNED": all(n % 16 == 0 for n in (*addresses, *columns, *sizes)),
        "SPLITS": splits,
    }
    device = first.device
    if current_capture():
        # Each replay copies it again, from pinned memory that torch does not reuse.
        copy = torch.tensor(table, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
    else:
        copy = _table_of(table, device, current_stream(device))
    return (len(rows), splits), copy, how


@lru_cache(maxsize=64)
@normal_tensors()
def _table_of(
    rows: tuple[tuple[int, ...], ...], device: torch.device, stream: torch.Stream | None
) -> torch.Tensor:
    """Copy a table to the device, once for equal tables; the host waits for the copy.

    Shards of weights keep their addresses. There is one table per stream, because the memory of a
    dropped table is reused on its stream only.
    """
    return torch.tensor(rows, dtype=torch.int64).to(device)
