"""Scales of blocks: exponents, casts, casts along other blocks and GEMMs, value by value."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from reference import reference_blocks, same_bits, sqnr
from torch.nn.functional import pad

from fp8_dist.kernels.blocks import (
    block_exponents,
    cast_blocks,
    dequantize_blocks,
    exponents_shape,
    quantize_block_copies,
    reblock,
)
from fp8_dist.kernels.gemm import block_scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
Blocks = tuple[int, int, int, int]

# Shapes and blocks: whole blocks, blocks that a size cuts, parts that begin inside of a block.
CASES: list[tuple[tuple[int, ...], Blocks]] = [
    ((5, 8), (1, 4, 0, 0)),
    ((5, 7), (1, 4, 0, 0)),
    ((5, 7), (1, 4, 0, 3)),
    ((8, 12), (4, 4, 0, 0)),
    ((6, 9), (4, 4, 0, 0)),
    ((7, 5), (4, 4, 3, 2)),
    ((3, 2), (8, 8, 2, 3)),  # inside of one block
    ((1, 1), (128, 128, 5, 127)),
    ((9, 3), (4, 1, 0, 0)),
    ((9, 3), (4, 1, 2, 0)),
    ((9,), (1, 4, 0, 1)),
    ((2, 3, 7), (1, 4, 0, 1)),
    ((2, 2, 3, 8), (1, 4, 0, 0)),
    ((3, 6, 9), (4, 4, 0, 0)),
    ((2, 2, 5, 3), (4, 4, 3, 2)),
    ((1, 300), (1, 128, 0, 0)),
]
RULES = pytest.mark.parametrize("rule", [None, "ceil", "floor"])


def many_magnitudes(*shape: int) -> torch.Tensor:
    """fp64, with rows of zeros, and some values that are subnormal in float8."""
    x = torch.randn(shape, dtype=torch.float64)
    x *= torch.logspace(-5, 1, shape[-1], dtype=torch.float64)[torch.randperm(shape[-1])]
    return x.masked_fill_(torch.rand(*shape[:-1], 1) < 0.2, 0) if len(shape) > 1 else x


def implementations(op: Any) -> list[Callable[..., Any]]:
    """The implementation for CPUs, the operator that graphs call, and the portable one."""
    return [op, op.overload, op.portable]


def check_cast(
    x: torch.Tensor, dtype: torch.dtype, blocks: Blocks, rule: str | None
) -> torch.Tensor:
    """Check all implementations of both operators; return the exponents."""
    matrices = x.reshape(-1, *(x.shape[-2:] if blocks[0] > 1 else (1, x.shape[-1])))
    found = [reference_blocks(matrix, dtype, blocks, rule) for matrix in matrices]
    expected, values = (torch.stack(each) for each in zip(*found, strict=True))
    expected = expected.view(exponents_shape(x.shape, blocks))
    for run in implementations(block_exponents):
        assert same_bits(run(x, dtype, blocks, rule), expected)
    for run in implementations(quantize_block_copies):
        (qdata,) = run(x, expected, dtype, blocks, [False])
        assert (qdata.dtype, qdata.shape) == (dtype, x.shape)
        assert qdata.is_contiguous()
        assert torch.equal(qdata.double().nan_to_num(1e9), values.view(x.shape).nan_to_num(1e9))
    return expected


@RULES
def test_a_cast_equals_the_reference(rule: str | None) -> None:
    for dtype, target, (shape, blocks) in product(DTYPES, (E4M3, E5M2), CASES):
        check_cast(many_magnitudes(*shape).to(dtype), target, blocks, rule)
    x = torch.randn(9, 20)
    for view in (x.t(), x[:, ::2], x[1:, 3:], x[:, :1].expand(9, 20)):
        for blocks in ((1, 4, 0, 0), (4, 4, 0, 0), (4, 4, 1, 3)):
            check_cast(view, E4M3, blocks, rule)


@RULES
def test_values_at_both_ends_of_a_dtype(rule: str | None) -> None:
    for dtype in DTYPES:
        kind = torch.finfo(dtype)
        sizes = [kind.max, kind.max / 2, kind.tiny, 0.0]
        sizes += [kind.smallest_normal * kind.eps] if dtype is not torch.float64 else [2.0**-149]
        for size in sizes:
            if size > torch.finfo(torch.float32).max:
                continue  # infinite as fp32, in which an amax is taken
            x = torch.tensor([[size, -size / 2, 0.0, size]], dtype=torch.float64).to(dtype)
            check_cast(x, E4M3, (1, 4, 0, 0), rule)
            check_cast(x, E5M2, (1, 2, 0, 1), rule)
    x = torch.tensor([[1e39, 1.0, 2.0, 3.0]], dtype=torch.float64)
    infinite, finite = block_exponents(x, E4M3, (1, 2, 0, 0), rule).tolist()[0]
    assert finite < infinite == 255


@RULES
def test_a_value_that_is_not_finite_stays_in_its_block(rule: str | None) -> None:
    for blocks, rows, columns in (
        ((1, 4, 0, 0), slice(5, 6), slice(4, 8)),
        ((4, 4, 0, 0), slice(4, 8), slice(4, 8)),
        ((4, 4, 1, 3), slice(3, 7), slice(5, 9)),
        ((4, 1, 0, 0), slice(4, 8), slice(6, 7)),
    ):
        expected = torch.zeros(10, 13, dtype=torch.bool)
        expected[rows, columns] = True
        for dtype, value in product(DTYPES, (math.nan, -math.nan, math.inf, -math.inf)):
            x = torch.randn(10, 13).to(dtype)
            x[5, 6] = value
            exponents = check_cast(x, E4M3, blocks, rule)
            (qdata,) = quantize_block_copies(x, exponents, E4M3, blocks, [False])
            found = dequantize_blocks(qdata, exponents, blocks, dtype)
            assert torch.equal(found.isnan(), expected)
            assert found[~expected].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0), (2, 0, 8), (0,)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    for blocks in ((1, 4, 0, 0), (1, 4, 0, 3), (4, 4, 0, 0), (4, 4, 3, 3), (4, 1, 0, 0)):
        if len(shape) != 2 and blocks[0] > 1:
            continue
        for run in implementations(block_exponents):
            exponents = run(x, E4M3, blocks, None)
            assert [*exponents.shape] == exponents_shape(shape, blocks)
            assert not exponents.any()
        for run in implementations(quantize_block_copies):
            (qdata,) = run(x, exponents, E4M3, blocks, [False])
            assert qdata.shape == shape
        assert dequantize_blocks(qdata, exponents, blocks, torch.float32).shape == shape
        for run in implementations(reblock) if len(shape) == 2 else ():
            again, found = run(qdata, exponents, blocks, 4, "ceil", False)
            assert again.shape == shape
            assert [*found.shape] == exponents_shape(shape, (4, 1, 0, 0))


# Larger than what the CPU's implementation takes at once, in some cases by rows that hold no block.
LARGE: list[tuple[tuple[int, ...], list[Blocks]]] = [
    ((300, 520), [(1, 32, 0, 7), (128, 128, 0, 0), (128, 128, 0, 5), (128, 128, 77, 5)]),
    ((3, 100, 520), [(1, 128, 0, 0), (128, 128, 0, 0), (32, 32, 0, 0)]),
    ((3, 96, 520), [(32, 32, 0, 0), (32, 32, 0, 5)]),
    ((3, 40000), [(128, 128, 0, 0)]),
    ((40000, 3), [(32, 32, 0, 0)]),
    ((2, 70000), [(1, 32, 0, 0)]),
]


@pytest.mark.parametrize(("shape", "each"), LARGE)
def test_large_tensors_on_cpus_have_the_portable_bits(
    shape: tuple[int, ...], each: list[Blocks]
) -> None:
    x = many_magnitudes(*shape).float()
    x[..., 0, 2] = torch.inf
    for blocks, view in product(each, (x, x.bfloat16(), x.mT.contiguous().mT)):
        exponents = block_exponents(view, E4M3, blocks, None)
        assert same_bits(exponents, block_exponents.portable(view, E4M3, blocks, None))
        (expected,) = quantize_block_copies.portable(view, exponents, E4M3, blocks, [False])
        part = pad(exponents, (1, 1, 1, 1))[..., 1:-1, 1:-1]  # of the exponents of a whole tensor
        for given in (part, exponents):
            (found,) = quantize_block_copies(view, given, E4M3, blocks, [False])
            assert same_bits(found, expected)
        if blocks[0] > 1 and len(shape) > 2:
            continue
        matrix = expected.reshape(-1, shape[-1])
        numbers = exponents.reshape(-1, exponents.shape[-1])
        for data, rows in product((matrix, matrix.t().contiguous().t()), (32, 128)):
            found = reblock(data, numbers, blocks, rows, None, False)
            portable = reblock.portable(data, numbers, blocks, rows, None, False)
            assert all(map(same_bits, found, portable))


@RULES
def test_blocks_along_the_rows_equal_the_reference(rule: str | None) -> None:
    matrix_cases = [case for case in CASES if len(case[0]) == 2]
    for target, (shape, blocks) in product((E4M3, E5M2), matrix_cases):
        exponents, values = reference_blocks(many_magnitudes(*shape), target, blocks, rule)
        qdata = values.to(target)
        wide = dequantize_blocks(qdata, exponents, blocks, torch.float32)
        assert torch.equal(wide.double(), values * element_scales(exponents, shape, blocks))
        numbers, expected = reference_blocks(wide, target, (4, 1, 0, 0), rule)
        for run in implementations(reblock):
            again, found = run(qdata, exponents, blocks, 4, rule, False)
            assert same_bits(found, numbers)
            assert torch.equal(again.double(), expected)


def element_scales(exponents: torch.Tensor, shape: Sequence[int], blocks: Blocks) -> torch.Tensor:
    """fp64, for each element of a matrix."""
    rows, columns, first_row, first_column = blocks
    out = torch.empty(*shape, dtype=torch.float64)
    for i, j in product(range(shape[0]), range(shape[1])):
        byte = int(exponents[(first_row + i) // rows, (first_column + j) // columns])
        out[i, j] = math.nan if byte == 255 else 2.0 ** (byte - 127)
    return out


Operand = tuple[torch.Tensor, torch.Tensor, Blocks]


def operand(m: int, k: int, blocks: Blocks) -> Operand:
    """Data, exponents and blocks of a matrix of values of many magnitudes."""
    x = torch.randn(m, k) * torch.randn(m, 1).exp() * torch.randn(k).exp()
    exponents = block_exponents(x, E4M3, blocks, None)
    return quantize_block_copies(x, exponents, E4M3, blocks, [False])[0], exponents, blocks


def transpose(x: Operand) -> Operand:
    data, exponents, (rows, columns, first_row, first_column) = x
    return data.t(), exponents.t(), (columns, rows, first_column, first_row)


def wide(x: Operand) -> torch.Tensor:
    """fp64."""
    return x[0].double() * element_scales(x[1], x[0].shape, x[2])


PAIRS: dict[str, Callable[[], tuple[Operand, Operand]]] = {
    "output": lambda: (operand(33, 40, (1, 8, 0, 0)), transpose(operand(17, 40, (8, 8, 0, 0)))),
    "grad_input": lambda: (operand(33, 17, (1, 8, 0, 0)), operand(17, 40, (8, 8, 0, 0))),
    "grad_weight": lambda: (
        transpose(operand(33, 17, (8, 1, 0, 0))),
        operand(33, 40, (8, 1, 0, 0)),
    ),
    "parts": lambda: (operand(33, 40, (1, 8, 0, 5)), transpose(operand(17, 40, (8, 8, 3, 5)))),
    "other blocks": lambda: (operand(32, 64, (1, 16, 0, 0)), operand(64, 32, (8, 4, 0, 0))),
    "one row": lambda: (operand(1, 40, (1, 8, 0, 0)), transpose(operand(17, 40, (8, 8, 0, 0)))),
    "no rows": lambda: (operand(0, 40, (1, 8, 0, 0)), transpose(operand(17, 40, (8, 8, 0, 0)))),
    "nothing to add": lambda: (
        operand(33, 0, (1, 8, 0, 0)),
        transpose(operand(17, 0, (8, 8, 0, 0))),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_products(pair: str) -> None:
    a, b = PAIRS[pair]()
    exact = wide(a) @ wide(b)
    given = (a[0], b[0], a[1], b[1], a[2], b[2])
    for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
        best = sqnr(exact, exact.to(out_dtype))
        for run in implementations(block_scaled_mm):
            found = run(*given, out_dtype, False)
            assert (found.dtype, found.shape) == (out_dtype, exact.shape)
            assert found.is_contiguous()
            assert sqnr(exact, found) > min(best - 0.5, 120)
        with torch.autocast("cpu", torch.bfloat16):
            again = block_scaled_mm(*given, out_dtype, False)
        assert same_bits(again, block_scaled_mm(*given, out_dtype, False))
    as_bf16 = (*given, torch.bfloat16, True)
    assert same_bits(block_scaled_mm(*as_bf16), block_scaled_mm.portable(*as_bf16))


@pytest.mark.parametrize("pair", ["output", "grad_input", "grad_weight", "parts"])
def test_nan_reaches_the_rows_and_the_columns_of_its_block(pair: str) -> None:
    for out_dtype, poisons_a in product((torch.float32, torch.bfloat16), (True, False)):
        a, b = PAIRS[pair]()
        exponents = a[1] if poisons_a else b[1]
        exponents[exponents.shape[0] // 2, 1] = 255
        exact = wide(a) @ wide(b)
        found = block_scaled_mm(a[0], b[0], a[1], b[1], a[2], b[2], out_dtype, False)
        assert exact.isnan().any()
        assert not exact.isnan().all()
        assert torch.equal(found.isnan(), exact.isnan())
        finite = ~exact.isnan()
        assert sqnr(exact[finite], found[finite]) > (45 if out_dtype is torch.bfloat16 else 120)


def test_operators_describe_their_results() -> None:
    """For tensors without data, as compilers trace them."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    for shape, blocks in (
        ((6, 10), (1, 4, 0, 0)),
        ((6, 10), (4, 4, 1, 3)),
        ((2, 3, 10), (1, 4, 0, 3)),
    ):
        x = torch.randn(shape)
        exponents = block_exponents(x, E4M3, blocks, "floor")
        assert [*exponents.shape] == exponents_shape(shape, blocks)
        (qdata,) = quantize_block_copies(x, exponents, E4M3, blocks, [False])
        calls.append((block_exponents, (x, E4M3, blocks, "ceil")))
        for transposed in ([False], [True], [False, True]):
            calls.append((cast_blocks, (x, E4M3, blocks, "ceil", transposed)))
            calls.append((quantize_block_copies, (x, exponents, E4M3, blocks, transposed)))
            if x.ndim == 2:
                calls.append((reblock, (qdata, exponents, blocks, 4, "ceil", transposed[-1])))
        if x.ndim == 2:
            b, b_exponents, blocks_b = transpose((qdata, exponents, blocks))
            given = (qdata, b, exponents, b_exponents, blocks, blocks_b, torch.bfloat16, True)
            calls.append((block_scaled_mm, given))
    for op, arguments in calls:
        torch.library.opcheck(op.overload, arguments, test_utils="test_faketensor")
