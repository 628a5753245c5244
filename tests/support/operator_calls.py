"""Calls of every operator that has Triton kernels, with edge cases in the data."""

import math
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fp8_dist.device import short_name
from fp8_dist.kernels import blocks as block_kernels
from fp8_dist.kernels import e2m1, encoding, folding, grouped, quantization, scale
from fp8_dist.kernels.cuda import triton as package
from fp8_dist.kernels.cuda.triton.launch import Kernel
from fp8_dist.kernels.custom_op import CustomOp
from fp8_dist.kernels.e2m1 import E2M1_X2
from fp8_dist.kernels.scale import INTEGERS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOTH = [False, True]


class Call(NamedTuple):
    """A call of an operator."""

    op: CustomOp[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Calls = dict[str, Call]


def call(op: CustomOp[..., Any], *args: Any, **kwargs: Any) -> Call:
    """Make a call."""
    return Call(op, args, kwargs)


def triton_kernels() -> list[Kernel]:
    """All Triton kernels of the library."""
    modules = [value for value in vars(package).values() if isinstance(value, ModuleType)]
    kernels = {id(k): k for m in modules for k in vars(m).values() if isinstance(k, Kernel)}
    return list(kernels.values())


def copied(x: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Copy a tensor to new memory, with the same strides and storage offset."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    size = x.storage_offset() + last + 1 if x.numel() else 0
    memory = torch.empty(size, dtype=x.dtype, device=device or x.device)
    to, integer = memory.as_strided(x.shape, x.stride(), x.storage_offset()), INTEGERS[x.itemsize]
    to.view(integer).copy_(x.view(integer))
    return to


def operator_calls(m: int, k: int) -> Calls:
    """Calls by name, on CPU matrices ``[m, k]``. The names are the same for all sizes."""
    calls: Calls = {}
    torch.manual_seed(0)
    cast_families = amax_calls, cast_calls, fold_calls, block_calls
    for family in (*cast_families, gemm_calls, message_calls):
        calls |= family(m, k)
    return calls


def moved(of: Call, device: torch.device | str | None = None) -> Call:
    """Copy the tensors of a call, to another device if one is given."""
    return Call(of.op, *tree_map_only(Tensor, lambda x: copied(x, device), tuple(of[1:])))


@cache
def spread(m: int, k: int) -> Tensor:
    """Values of all magnitudes that a float8 format has relative to its largest, and zeros."""
    x = torch.randn(m, k) * 4.0 ** (3 * torch.randn(m, k)).clamp(-8, 5)
    x[:, 3:4], x[4:5] = 0.0, -0.0
    return x


def ordinary(m: int, k: int, dtype: torch.dtype = BF16) -> Tensor:
    """Finite values of many magnitudes."""
    return spread(m, k).to(dtype, copy=True)


def special(m: int, k: int, dtype: torch.dtype = BF16) -> Tensor:
    """The values of `ordinary` with a NaN, infinities, subnormals and the extreme finite values."""
    x, info = ordinary(m, k, dtype), torch.finfo(dtype)
    x[0, 5], x[1, 6], x[2, 7] = math.nan, math.inf, -math.inf
    x[6] = torch.randn(k) * info.smallest_normal / 4
    x[7, 0], x[8, 1], x[9, 2] = info.max, info.min, info.smallest_normal
    return x


def views(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield views of the matrix with other strides, and one that is not aligned."""
    yield "transposed", x.t().contiguous().t()
    yield "with gaps", x.new_zeros(x.shape[0], x.shape[1] + 3)[:, 2:-1].copy_(x)
    yield "without its first row", x[1:]


def amax_calls(m: int, k: int) -> Calls:
    """Calls for amaxes of a tensor, of rows, of columns and of many tensors, and for scales."""
    x, amax = special(m, k), scale.amax
    calls = {f"amax along {dims}": call(amax, x, dims) for dims in (None, [0], [1])}
    calls["amax of finite values"] = call(amax, ordinary(m, k))
    for name, view in views(x):
        calls |= {f"amax along {dims} {name}": call(amax, view, dims) for dims in ([0], [1])}
    for dtype in (FP16, FP32):
        calls[f"amax {short_name(dtype)}"] = call(amax, ordinary(m, k, dtype))
        calls[f"amax along [1] {short_name(dtype)}"] = call(amax, special(m, k, dtype), [1])
    calls["amaxes"] = call(scale.amaxes, x, ["row", "column"])
    others = [ordinary(3, 5), x[: m // 2].clone(), ordinary(m, 7)]
    for name, by_row in {"": False, " by rows": True}.items():
        calls[f"amax_of_tensors{name}"] = call(scale.amax_of_tensors, x, others, by_row)
    amaxes = amax.portable(special(m, 8, FP32), [1])
    amaxes[10], amaxes[11], amaxes[12] = 0.0, 1e-13, 1e-40
    for dtype, power in ((E4M3, True), (E5M2, False)):
        name = f"scaling_from_amax {short_name(dtype)}"
        calls[name] = call(scale.scaling_from_amax, amaxes, dtype, power)
    return calls


def cast_calls(m: int, k: int) -> Calls:
    """Calls that cast with fp32 scales, per tensor or row."""
    x, s, cast, of = ordinary(m, k), special(m, k), quantization.cast_copies, [0, 0]
    one, calls = scale.amax.portable(x), {}
    for dtype in (E4M3, E5M2):
        name = f"cast_copies {short_name(dtype)} both layouts"
        calls[name] = call(cast, x, [one], dtype, False, of, BOTH)
        calls[f"{name}, float32"] = call(cast, x.float(), [one], dtype, False, of, BOTH)
    for name, view in views(x):
        calls[f"cast_copies {name}"] = call(cast, view, [one], E5M2, False, of, BOTH)
    calls["cast_copies transposed"] = call(cast, x, [one], E4M3, False, [0], [True])
    rows, columns = scale.amaxes.portable(s, ["row", "column"])
    calls["cast_copies by rows"] = call(cast, s, [rows], E4M3, True, [0], [False])
    calls["cast_copies by columns"] = call(cast, s, [columns], E4M3, False, of, BOTH)
    for high, dtype in ((BF16, E4M3), (FP16, E4M3), (FP32, E5M2)):
        wide, name = special(m, k, high), f"{short_name(high)} to {short_name(dtype)}"
        each = scale.amaxes.portable(wide, ["row", "column"])
        calls[f"cast_copies by both {name}"] = call(cast, wide, each, dtype, True, [0, 1], BOTH)
        saturated = call(cast, wide, [one / 8], dtype, False, of, BOTH, saturate=True)
        calls[f"cast_copies saturated {name}"] = saturated
        how = dtype, True, [False], True
        calls[f"cast_fresh {name}"] = call(quantization.cast_fresh, wide, *how)
        # (With non-finite values its codes are unspecified.)
        args = ordinary(m, k, high), one / 2, dtype, True, BOTH
        calls[f"cast_and_measure {name}"] = call(quantization.cast_and_measure, *args)
    calls["cast_and_measure e5m2"] = call(quantization.cast_and_measure, x, one, E5M2, False, BOTH)
    calls["cast_fresh both layouts"] = call(quantization.cast_fresh, s, E4M3, False, BOTH, True)
    calls["cast_fresh tensor"] = call(quantization.cast_fresh, s, E4M3, False, BOTH)
    long = ordinary(3, 16400)  # rows too long for registers
    calls["cast_fresh long"] = call(quantization.cast_fresh, long, E4M3, True, [False], True)
    others = [ordinary(3, 5), x[: m // 2].clone(), ordinary(m, 7)]
    for name, by_row in {"": False, " by rows": True}.items():
        each = scale.amax_of_tensors.portable(x, others, by_row)
        sizes = [tensor.numel() for tensor in (x, *others)]
        how = E4M3, by_row, by_row
        calls[f"cast_tensors{name}"] = call(quantization.cast_tensors, x, others, each, sizes, *how)
    stacked = s[: m // 3 * 3].view(3, -1, k)
    each = scale.amax.portable(stacked, [1, 2])
    calls["amax of matrices"] = call(scale.amax, stacked, [1, 2])
    calls["cast_copies of matrices"] = call(cast, stacked, [each], E4M3, True, [0], [False])
    calls["quantize"] = call(quantization.quantize, x, torch.tensor(1e3), E5M2)
    calls["quantize by columns"] = call(quantization.quantize, s, 448 / columns, E4M3)
    return calls


def scales_of_rows(m: int) -> Tensor:
    """Power-of-two scales of rows."""
    x = ordinary(m, 8, FP32) * 8.0 ** torch.randn(m, 1)
    return scale.scaling_from_amax.portable(scale.amax.portable(x, [1]), E4M3, True)[1].view(-1)


def fold_calls(m: int, k: int) -> Calls:
    """Calls that cast with folded scales, of a gradient and of groups."""
    fold, calls = folding.fold_gradient, {}
    s, t = scales_of_rows(k), scales_of_rows(m)
    for high, to in ((BF16, E4M3), (FP16, E4M3), (FP32, E5M2)):
        name = f"fold_gradient {short_name(high)}"
        calls[name] = call(fold, special(m, k, high), to, s, t, True)
    calls["fold_gradient of the weight"] = call(fold, special(m, k), E4M3, s, None, True)
    calls["fold_gradient of the input"] = call(fold, ordinary(m, k), E4M3, None, t, True)
    # Empty groups, a group of one row, and groups that end inside a tile.
    counts = torch.tensor([0, 1, 15, 17, m - 33, 0])
    groups = grouped.Groups.of(counts, counts, m)
    _, of_rows, data = quantization.cast_fresh.portable(special(m, k), E4M3, True, [False], True)
    s, source = scales_of_rows(6 * k).view(6, k), groups.padded(16).source
    of, rest = (folding.fold_groups, data, of_rows), (groups.group_of_row, 6)
    calls["fold_groups"] = call(*of, s, t, *rest, source)
    calls["fold_groups of the weight"] = call(*of, s, None, *rest)
    calls["fold_groups of the input"] = call(*of, None, t, *rest, source)
    for name, transposed in {"": False, " transposed": True}.items():
        calls[f"rows_of_groups{name}"] = call(grouped.rows_of_groups, data, source, transposed)
    for multiple in (1, 16):
        count = len(groups.padded(multiple).source)
        calls[f"places_of_groups {multiple}"] = call(
            grouped.places_of_groups, counts, count, multiple
        )
    return calls


def block_calls(m: int, k: int) -> Calls:
    """Calls that cast with scales of blocks, or recast to other blocks."""
    x, cast, calls = special(m, k), block_kernels.cast_blocks, {}
    kinds: tuple[tuple[Any, ...], ...] = (  # blocks, dtype, rule; new blocks
        ((1, 128, 0, 0), E4M3, None, 128),
        ((1, 32, 0, 5), E5M2, "ceil", 32),
        ((128, 128, 0, 0), E4M3, "ceil", 128),
        ((32, 32, 7, 31), E5M2, "floor", 32),
        ((128, 128, 0, 0), E2M1_X2, "even", 128),
        ((32, 32, 7, 30), E2M1_X2, "floor", 32),
    )
    for blocks, dtype, rule, rows in kinds:
        of = f"{blocks[0]}x{blocks[1]} {short_name(dtype)}"
        exponents, data = cast.portable(x, dtype, blocks, rule, [False])
        calls[f"cast_blocks {of} both layouts"] = call(cast, x, dtype, blocks, rule, BOTH)
        calls[f"block_exponents {of}"] = call(block_kernels.block_exponents, x, dtype, blocks, rule)
        copies = x, exponents, dtype, blocks, BOTH
        calls[f"quantize_block_copies {of}"] = call(block_kernels.quantize_block_copies, *copies)
        many = x, [x[: m // 2].clone(), x[:3].clone()]
        each, of_many = block_kernels.cast_tensors_in_blocks, (dtype, blocks)
        calls[f"exponents of tensors {of}"] = call(each, *many, None, *of_many, rule=rule)
        found = each.portable(*many, None, *of_many, rule=rule)
        calls[f"cast_tensors_in_blocks {of}"] = call(each, *many, found, *of_many)
        known = data, exponents, blocks
        for wide in (BF16, FP32):
            name = f"dequantize_blocks {of} to {short_name(wide)}"
            calls[name] = call(block_kernels.dequantize_blocks, *known, wide)
        calls[f"reblock {of}"] = call(block_kernels.reblock, *known, rows, rule and "ceil", True)
    for high in (BF16, FP32):  # with the blocks of the last kind
        even = special(m, k, high)[:, : k // 2 * 2]
        of = even, block_kernels.block_exponents.portable(even, E2M1_X2, blocks, "floor"), blocks
        calls[f"pack_blocks {short_name(high)}"] = call(block_kernels.pack_blocks, *of)
        one = of[0].contiguous(), [], of[1].view(-1), E2M1_X2, blocks
        calls[f"cast_tensors_in_blocks packed {short_name(high)}"] = call(each, *one, packed=True)
    packed, out = block_kernels.pack_blocks.portable(*of), torch.zeros(even.shape, dtype=E4M3)
    calls["unpack_e2m1"] = call(e2m1.unpack_e2m1, packed, out)
    blocks, dtype, *_ = kinds[0]
    exponents, data = cast.portable(x, dtype, blocks, None, [False])
    one = x, exponents, dtype, blocks, [False]
    calls["quantize_block_copies one layout"] = call(block_kernels.quantize_block_copies, *one)
    calls["reblock row-major"] = call(
        block_kernels.reblock, data, exponents, blocks, 128, None, False
    )
    calls["cast_blocks one layout"] = call(cast, x, dtype, blocks, None, [False])
    for high in (FP16, FP32):
        name = f"cast_blocks {short_name(high)}"
        calls[name] = call(cast, special(m, k, high), dtype, blocks, None, BOTH)
    return calls


def gemm_calls(m: int, k: int) -> Calls:
    """Calls that prepare the operands of GEMMs."""
    data = ordinary(m, k).to(E4M3)
    calls = {"transposed_copy": call(quantization.transposed_copy, data)}
    calls["transposed_copy to 128"] = call(quantization.transposed_copy, data, 128)
    stacked = data.view(torch.uint8)[: m // 3 * 3].view(3, -1, k).view(E5M2)
    calls["transposed_copy of three"] = call(quantization.transposed_copy, stacked)
    return calls


def message_calls(m: int, k: int) -> Calls:
    """Calls that encode, decode and sum messages."""
    calls, encode = {}, encoding.encode_float8
    for high in (BF16, FP16, FP32):
        calls[f"encode_float8 {short_name(high)}"] = call(encode, special(m, k, high))
    codes, exponents = encode.portable(special(3 * m, k))
    sums, numbers = encoding.sum_of_rows, special(3 * m, k).view(3, m, k)
    calls["sum_of_rows of one"] = call(sums, codes.unsqueeze(0), exponents.unsqueeze(0), None, -1)
    codes, exponents = codes.view(3, m, k), exponents.view(3, m, -1)
    calls["sum_of_rows of codes"] = call(sums, codes, exponents, ordinary(m, k), 1)
    calls["sum_of_rows of numbers"] = call(sums, numbers, None, ordinary(m, k, FP32), 2)
    calls["sum_of_rows behind own"] = call(sums, codes, exponents, ordinary(m, k, FP32), -1)
    calls["sum_of_rows alone"] = call(sums, numbers, None, None, 0)
    return calls
