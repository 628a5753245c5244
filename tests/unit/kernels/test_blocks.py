"""Scales of blocks: exponents, casts, casts along other blocks and GEMMs, value by value."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from reference import reference_blocks, same_bits, sqnr

from fp8_dist.kernels import (
    block_exponents,
    block_scaled_mm,
    exponents_of_groups,
    quantize_blocks,
    reblock,
    reblock_groups,
)
from fp8_dist.kernels.block_gemm import dequantized
from fp8_dist.kernels.blocks import exponents_shape

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
Blocks = tuple[int, int, int, int]

# Shape and blocks: whole ones, such as sizes do not divide, parts that begin inside of blocks.
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
EMPTY = [(0, 8), (8, 0), (0, 0), (2, 0, 8), (0,)]
RULES = pytest.mark.parametrize("rule", [None, "ceil", "floor"])


def of_many_magnitudes(*shape: int) -> torch.Tensor:
    """fp64, with rows of zeros, and some values that are subnormal in float8."""
    x = torch.randn(shape, dtype=torch.float64)
    x *= torch.logspace(-5, 1, shape[-1], dtype=torch.float64)[torch.randperm(shape[-1])]
    return x.masked_fill_(torch.rand(*shape[:-1], 1) < 0.2, 0) if len(shape) > 1 else x


def implementations(op: Any) -> list[Callable[..., Any]]:
    """For CPUs, called directly; as graphs call it; for all devices."""
    return [op, op.overload, op.portable]


def check_cast(
    x: torch.Tensor, dtype: torch.dtype, blocks: Blocks, rule: str | None
) -> torch.Tensor:
    """Both operators against the reference, as each is implemented; the exponents."""
    matrices = x.reshape(-1, *(x.shape[-2:] if blocks[0] > 1 else (1, x.shape[-1])))
    found = [reference_blocks(matrix, dtype, blocks, rule) for matrix in matrices]
    expected, values = (torch.stack(each) for each in zip(*found, strict=True))
    expected = expected.view(exponents_shape(x.shape, blocks))
    for run in implementations(block_exponents):
        assert same_bits(run(x, dtype, blocks, rule), expected)
    for run in implementations(quantize_blocks):
        qdata = run(x, expected, dtype, blocks)
        assert (qdata.dtype, qdata.shape) == (dtype, x.shape)
        assert qdata.is_contiguous()
        assert torch.equal(qdata.double().nan_to_num(1e9), values.view(x.shape).nan_to_num(1e9))
    return expected


@RULES
@pytest.mark.parametrize("target", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cast_equals_the_reference(
    dtype: torch.dtype, target: torch.dtype, rule: str | None
) -> None:
    for shape, blocks in CASES:
        check_cast(of_many_magnitudes(*shape).to(dtype), target, blocks, rule)


def test_strides_change_nothing() -> None:
    x = torch.randn(9, 20)
    for view in (x.t(), x[:, ::2], x[1:, 3:], x[:, :1].expand(9, 20)):
        for blocks in ((1, 4, 0, 0), (4, 4, 0, 0), (4, 4, 1, 3)):
            check_cast(view, E4M3, blocks, "ceil")


@RULES
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_at_both_ends_of_a_dtype(dtype: torch.dtype, rule: str | None) -> None:
    kind = torch.finfo(dtype)
    sizes = [kind.max, kind.max / 2, kind.tiny, 0.0]
    sizes += [kind.smallest_normal * kind.eps] if dtype is not torch.float64 else [2.0**-149]
    for size in sizes:
        if size > torch.finfo(torch.float32).max:
            continue  # infinite as fp32, in which an amax is taken
        x = torch.tensor([[size, -size / 2, 0.0, size]], dtype=torch.float64).to(dtype)
        check_cast(x, E4M3, (1, 4, 0, 0), rule)
        check_cast(x, E5M2, (1, 2, 0, 1), rule)


@RULES
def test_fp64_values_that_are_infinite_as_fp32(rule: str | None) -> None:
    x = torch.tensor([[1e39, 1.0, 2.0, 3.0]], dtype=torch.float64)
    assert block_exponents(x, E4M3, (1, 2, 0, 0), rule).tolist()[0][0] == 255
    assert block_exponents(x[:, 2:], E4M3, (1, 2, 0, 0), rule).tolist()[0][0] < 255


def test_each_rule_at_each_bf16_value_of_an_octave() -> None:
    """Floor saturates those above 448 / 512 of the next power of two, the others none."""
    x = (1 + torch.arange(128) / 128).view(128, 1).bfloat16()
    blocks = (1, 1, 0, 0)
    sizes = {}
    for rule in (None, "ceil", "floor"):
        exponents = block_exponents(x, E4M3, blocks, rule)
        qdata = quantize_blocks(x, exponents, E4M3, blocks)
        found = dequantized(qdata, exponents, blocks, torch.float32)
        sizes[rule] = (found / x.float() - 1).abs().flatten()
        assert set(exponents.flatten().tolist()) == ({119} if rule == "floor" else {119, 120})
    assert torch.equal(sizes["ceil"], sizes[None])
    assert sizes["ceil"].max() <= 2**-4
    above = x.flatten() > 1.75 * (1 + 2**-5)
    assert sizes["floor"][~above].max() <= 2**-4
    assert (sizes["floor"][above] > 2**-6).all()
    assert sizes["floor"].max() < 0.125


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@RULES
def test_a_value_that_is_not_finite_stays_in_its_block(
    rule: str | None, dtype: torch.dtype, value: float
) -> None:
    for blocks, rows, columns in (
        ((1, 4, 0, 0), slice(5, 6), slice(4, 8)),
        ((4, 4, 0, 0), slice(4, 8), slice(4, 8)),
        ((4, 4, 1, 3), slice(3, 7), slice(5, 9)),
        ((4, 1, 0, 0), slice(4, 8), slice(6, 7)),
    ):
        x = torch.randn(10, 13).to(dtype)
        x[5, 6] = value
        exponents = check_cast(x, E4M3, blocks, rule)
        found = dequantized(quantize_blocks(x, exponents, E4M3, blocks), exponents, blocks, dtype)
        expected = torch.zeros(10, 13, dtype=torch.bool)
        expected[rows, columns] = True
        assert torch.equal(found.isnan(), expected)
        assert found[~expected].isfinite().all()


@pytest.mark.parametrize("shape", EMPTY)
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    for blocks in ((1, 4, 0, 0), (1, 4, 0, 3), (4, 4, 0, 0), (4, 4, 3, 3), (4, 1, 0, 0)):
        if len(shape) != 2 and blocks[0] > 1:
            continue
        sizes = exponents_shape(shape, blocks)
        for run in implementations(block_exponents):
            exponents = run(x, E4M3, blocks, None)
            assert [*exponents.shape] == sizes
            assert not exponents.any()
        for run in implementations(quantize_blocks):
            assert run(x, exponents, E4M3, blocks).shape == shape
        qdata = quantize_blocks(x, exponents, E4M3, blocks)
        assert dequantized(qdata, exponents, blocks, torch.float32).shape == shape
        for run in implementations(reblock) if len(shape) == 2 else ():
            again, found = run(qdata, exponents, blocks, 4, "ceil")
            assert again.shape == shape
            assert [*found.shape] == exponents_shape(shape, (4, 1, 0, 0))


# Larger than what the CPU's implementation takes at once, in some cases by rows that hold no block.
LARGE: list[tuple[tuple[int, ...], Blocks]] = [
    ((300, 520), (1, 128, 0, 0)),
    ((300, 520), (1, 32, 0, 7)),
    ((300, 520), (128, 128, 0, 0)),
    ((300, 520), (128, 128, 0, 5)),
    ((300, 520), (128, 128, 77, 5)),
    ((3, 100, 520), (1, 128, 0, 0)),
    ((3, 100, 520), (128, 128, 0, 0)),
    ((3, 40000), (128, 128, 0, 0)),
    ((40000, 3), (32, 32, 0, 0)),
    ((2, 70000), (1, 32, 0, 0)),
]


@pytest.mark.parametrize(("shape", "blocks"), LARGE)
def test_large_tensors_on_cpus_have_the_portable_bits(
    shape: tuple[int, ...], blocks: Blocks
) -> None:
    x = of_many_magnitudes(*shape).float()
    x[..., 0, 2] = torch.inf
    for view in (x, x.bfloat16(), x.mT.contiguous().mT):
        exponents = block_exponents(view, E4M3, blocks, None)
        assert same_bits(exponents, block_exponents.portable(view, E4M3, blocks, None))
        expected = quantize_blocks.portable(view, exponents, E4M3, blocks)
        assert same_bits(quantize_blocks(view, exponents, E4M3, blocks), expected)
        matrix = expected.reshape(-1, shape[-1])
        if blocks[0] > 1 and len(shape) > 2:
            continue
        numbers = exponents.reshape(-1, exponents.shape[-1])
        for data in (matrix, matrix.t().contiguous().t()):
            for rows in (32, 128):
                found = reblock(data, numbers, blocks, rows, None)
                portable = reblock.portable(data, numbers, blocks, rows, None)
                assert all(same_bits(a, b) for a, b in zip(found, portable, strict=True))


@pytest.mark.parametrize("target", [E4M3, E5M2])
@RULES
def test_blocks_along_the_rows_equal_the_reference(rule: str | None, target: torch.dtype) -> None:
    for shape, blocks in CASES:
        if len(shape) != 2:
            continue
        x = of_many_magnitudes(*shape)
        exponents, values = reference_blocks(x, target, blocks, rule)
        qdata = values.to(target)
        wide = dequantized(qdata, exponents, blocks, torch.float32)
        assert torch.equal(wide.double(), values * scale_of_each(exponents, shape, blocks))
        numbers, expected = reference_blocks(wide, target, (4, 1, 0, 0), rule)
        for run in implementations(reblock):
            again, found = run(qdata, exponents, blocks, 4, rule)
            assert same_bits(found, numbers)
            assert torch.equal(again.double(), expected)


def scale_of_each(exponents: torch.Tensor, shape: Sequence[int], blocks: Blocks) -> torch.Tensor:
    """fp64, for each element of a matrix."""
    rows, columns, first_row, first_column = blocks
    out = torch.empty(*shape, dtype=torch.float64)
    for i in range(shape[0]):
        for j in range(shape[1]):
            byte = int(exponents[(first_row + i) // rows, (first_column + j) // columns])
            out[i, j] = math.nan if byte == 255 else 2.0 ** (byte - 127)
    return out


@pytest.mark.parametrize("spread", [0, 4, 8])
@RULES
def test_blocks_along_the_rows_round_small_values_alone(rule: str | None, spread: int) -> None:
    """Values up to 2 ** -14 of the largest of their new block, by at most 2 ** -10 of its scale."""
    rows = 128
    # Tokens of many magnitudes, so that neighbours in a column had different scales.
    x = torch.randn(300, 200).clamp(-4, 4) * (spread * torch.randn(300, 1)).exp()
    x = torch.where(x.abs() < 2**-8, 2**-8, x) if not spread else x
    blocks = (1, 32, 0, 0)
    exponents = block_exponents(x, E4M3, blocks, rule)
    qdata = quantize_blocks(x, exponents, E4M3, blocks)
    again, numbers = reblock(qdata, exponents, blocks, rows, rule and "ceil")
    before = dequantized(qdata, exponents, blocks, torch.float64)
    after = dequantized(again, numbers, (rows, 1, 0, 0), torch.float64)
    scale = scale_of_each(numbers, x.shape, (rows, 1, 0, 0))
    largest = torch.cat([part.abs().amax(0).expand_as(part) for part in before.split(rows)])
    rounded = before != after
    assert (before.abs() <= largest * 2**-14)[rounded].all()
    assert ((before - after).abs() <= scale * 2**-10).all()
    assert bool(rounded.any()) is (spread > 0)


def test_one_nan_reaches_the_columns_of_its_block_and_no_others() -> None:
    x = torch.randn(300, 200)
    x[130, 40] = torch.nan
    blocks = (1, 32, 0, 0)
    exponents = block_exponents(x, E4M3, blocks, None)
    qdata = quantize_blocks(x, exponents, E4M3, blocks)
    expected = torch.zeros(300, 200, dtype=torch.bool)
    expected[128:256, 32:64] = True
    for run in implementations(reblock):
        again, numbers = run(qdata, exponents, blocks, 128, None)
        found = dequantized(again, numbers, (128, 1, 0, 0), torch.float32)
        assert torch.equal(found.isnan(), expected)


@pytest.mark.parametrize("rule", [None, "ceil"])
@pytest.mark.parametrize("value", [1.0, math.nan])
def test_blocks_whose_rows_are_in_several_places(value: float, rule: str | None) -> None:
    """Each place finds the exponents of what it has of each block; the largest are the block's."""
    x = of_many_magnitudes(300, 200).float()
    x[130, 40] = value
    blocks, rows = (1, 32, 0, 0), 128
    exponents = block_exponents(x, E4M3, blocks, None)
    qdata = quantize_blocks(x, exponents, E4M3, blocks)
    expected, numbers = reblock(qdata, exponents, blocks, rows, rule)
    places = [part.sort().values for part in torch.randperm(300).split([150, 149, 1])]
    for op, again in product(implementations(exponents_of_groups), implementations(reblock_groups)):
        found = [op(qdata[p], exponents[p], blocks, p // rows, 3, rule) for p in places]
        assert all(each.shape == (3, 200) for each in found)
        largest = torch.stack(found).amax(0)
        assert same_bits(largest, numbers)
        for place in places:
            mine = again(qdata[place], exponents[place], blocks, place // rows, largest)
            assert same_bits(mine[0], expected[place])
            assert same_bits(mine[1], numbers[place // rows])


# GEMMs


Operand = tuple[torch.Tensor, torch.Tensor, Blocks]


def operand(m: int, k: int, blocks: Blocks) -> Operand:
    """Data, exponents and blocks of a matrix of values of many magnitudes."""
    x = torch.randn(m, k) * torch.randn(m, 1).exp() * torch.randn(k).exp()
    exponents = block_exponents(x, E4M3, blocks, None)
    return quantize_blocks(x, exponents, E4M3, blocks), exponents, blocks


def turned(x: Operand) -> Operand:
    data, exponents, (rows, columns, first_row, first_column) = x
    return data.t(), exponents.t(), (columns, rows, first_column, first_row)


def wide(x: Operand) -> torch.Tensor:
    """fp64."""
    return x[0].double() * scale_of_each(x[1], x[0].shape, x[2])


PAIRS: dict[str, Callable[[], tuple[Operand, Operand]]] = {
    "output": lambda: (operand(33, 40, (1, 8, 0, 0)), turned(operand(17, 40, (8, 8, 0, 0)))),
    "grad_input": lambda: (operand(33, 17, (1, 8, 0, 0)), operand(17, 40, (8, 8, 0, 0))),
    "grad_weight": lambda: (turned(operand(33, 17, (8, 1, 0, 0))), operand(33, 40, (8, 1, 0, 0))),
    "parts": lambda: (operand(33, 40, (1, 8, 0, 5)), turned(operand(17, 40, (8, 8, 3, 5)))),
    "other blocks": lambda: (operand(32, 64, (1, 16, 0, 0)), operand(64, 32, (8, 4, 0, 0))),
    "one row": lambda: (operand(1, 40, (1, 8, 0, 0)), turned(operand(17, 40, (8, 8, 0, 0)))),
    "no rows": lambda: (operand(0, 40, (1, 8, 0, 0)), turned(operand(17, 40, (8, 8, 0, 0)))),
    "nothing to add": lambda: (operand(33, 0, (1, 8, 0, 0)), turned(operand(17, 0, (8, 8, 0, 0)))),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products(pair: str, out_dtype: torch.dtype) -> None:
    a, b = PAIRS[pair]()
    exact = wide(a) @ wide(b)
    best = sqnr(exact, exact.to(out_dtype))
    for run in implementations(block_scaled_mm):
        found = run(a[0], b[0], a[1], b[1], a[2], b[2], out_dtype, False)
        assert (found.dtype, found.shape) == (out_dtype, exact.shape)
        assert found.is_contiguous()
        assert sqnr(exact, found) > min(best - 0.5, 120)
    with torch.autocast("cpu", torch.bfloat16):
        again = block_scaled_mm(a[0], b[0], a[1], b[1], a[2], b[2], out_dtype, False)
    assert same_bits(again, block_scaled_mm(a[0], b[0], a[1], b[1], a[2], b[2], out_dtype, False))


@pytest.mark.parametrize("pair", PAIRS)
def test_a_bf16_product_has_the_portable_bits(pair: str) -> None:
    a, b = PAIRS[pair]()
    arguments = (a[0], b[0], a[1], b[1], a[2], b[2], torch.bfloat16, True)
    assert same_bits(block_scaled_mm(*arguments), block_scaled_mm.portable(*arguments))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pair", ["output", "grad_input", "grad_weight", "parts"])
def test_nan_reaches_the_rows_and_the_columns_of_its_block(
    pair: str, out_dtype: torch.dtype
) -> None:
    for of_a in (True, False):
        a, b = PAIRS[pair]()
        exponents = a[1] if of_a else b[1]
        exponents[exponents.shape[0] // 2, 1] = 255
        exact = wide(a) @ wide(b)
        found = block_scaled_mm(a[0], b[0], a[1], b[1], a[2], b[2], out_dtype, False)
        assert exact.isnan().any()
        assert not exact.isnan().all()
        assert torch.equal(found.isnan(), exact.isnan())
        finite = ~exact.isnan()
        assert sqnr(exact[finite], found[finite]) > (45 if out_dtype is torch.bfloat16 else 120)


@pytest.mark.parametrize("blocks", [(1, 4, 0, 0), (4, 4, 1, 3)])
def test_operators_describe_their_results(blocks: Blocks) -> None:
    """For tensors without data, as compilers trace them."""
    x = torch.randn(6, 10)
    exponents = block_exponents(x, E4M3, blocks, "floor")
    qdata = quantize_blocks(x, exponents, E4M3, blocks)
    rows, columns, *first = blocks
    other = (qdata.t(), exponents.t(), (columns, rows, *first[::-1]))
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (block_exponents, (x, E4M3, blocks, "ceil")),
        (quantize_blocks, (x, exponents, E4M3, blocks)),
        (reblock, (qdata, exponents, blocks, 4, "ceil")),
        (
            block_scaled_mm,
            (qdata, other[0], exponents, other[1], blocks, other[2], torch.bfloat16, True),
        ),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op.overload, arguments, test_utils="test_faketensor")
