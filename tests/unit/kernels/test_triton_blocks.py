"""The kernels for GPUs that cast in blocks, against the portable implementations.

In Triton's interpreter on CPUs, compiled where there is a GPU; every bit is compared.
"""

import math
from itertools import product
from types import ModuleType

import pytest
import torch
from implementations import check_operator
from reference import same_values

from fp8_dist.dtypes import FLOAT8_DTYPES
from fp8_dist.kernels import (
    block_exponents,
    block_exponents_of_each,
    block_scaled_mm,
    cast_blocks,
    quantize_block_copies,
    quantize_blocks,
    quantize_blocks_of_each,
    reblock,
)
from fp8_dist.kernels.block_gemm import dequantized
from fp8_dist.kernels.cuda import DTYPES, block_operators, triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Blocks = tuple[int, int, int, int]

# Whole blocks, such as sizes do not divide, parts that begin inside of a block or are one's inside.
CASES: list[tuple[tuple[int, int], Blocks]] = [
    ((5, 256), (1, 128, 0, 0)),
    ((70, 200), (1, 128, 0, 0)),
    ((3, 130), (1, 32, 0, 5)),
    ((140, 260), (128, 128, 0, 0)),
    ((70, 200), (32, 32, 7, 31)),
    ((3, 2), (128, 128, 2, 100)),
    ((1, 1), (32, 32, 31, 31)),
    ((9, 3), (4, 1, 2, 0)),
    ((9, 10), (1, 1, 0, 0)),
    ((2, 300), (1, 256, 0, 0)),
]
RULES = pytest.mark.parametrize("rule", [None, "ceil", "floor"])

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy: x / 0, NaN


def matrix(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values over the whole range of a format beside its largest."""
    return (torch.randn(shape) * 4.0 ** (3 * torch.randn(shape)).clamp(-8, 5)).to(DEVICE, dtype)


def check_layouts(
    found: tuple[torch.Tensor | None, torch.Tensor | None], expected: torch.Tensor
) -> None:
    qdata, qdata_t = found
    for layout, values in ((qdata, expected), (qdata_t, expected.t())):
        assert layout is not None
        assert layout.is_contiguous()
        assert same_values(layout, values)


def check(x: torch.Tensor, dtype: torch.dtype, blocks: Blocks, rule: str | None) -> torch.Tensor:
    """All that casts a matrix in blocks; the cast."""
    exponents = block_exponents.portable(x, dtype, blocks, rule)
    expected = quantize_blocks.portable(x, exponents, dtype, blocks)
    found = triton.cast_blocks(x, dtype, blocks, rule, column_major=True)
    assert torch.equal(found.exponents, exponents)
    check_layouts(found[:2], expected)
    assert torch.equal(triton.block_exponents(x, dtype, blocks, rule), exponents)
    check_layouts(triton.quantize_blocks(x, exponents, dtype, blocks, column_major=True), expected)
    return expected


def check_reblock(
    qdata: torch.Tensor,
    exponents: torch.Tensor,
    blocks: Blocks,
    rows: int = 32,
    rule: str | None = "ceil",
) -> None:
    expected, numbers = reblock.portable(qdata, exponents, blocks, rows, rule)
    for transposed in (False, True):
        data, found = triton.reblock(qdata, exponents, blocks, rows, rule, transposed)
        assert torch.equal(found, numbers)
        assert data.is_contiguous()
        assert same_values(data, expected.t() if transposed else expected)


@RULES
def test_casts_of_any_shape_and_strides(rule: str | None) -> None:
    for shape, blocks in CASES:
        check(matrix(shape, torch.bfloat16), E4M3, blocks, rule)
    x = matrix((40, 72), torch.bfloat16)
    for view in (x.t(), x[:, 1::2], x[1:, 3:-1], x[:, :1].expand(40, 72)):
        for blocks in ((1, 32, 0, 0), (32, 32, 3, 5)):
            qdata = check(view, E4M3, blocks, rule)
            exponents = block_exponents.portable(view, E4M3, blocks, rule)
            check_reblock(qdata.t().contiguous().t(), exponents.t().contiguous().t(), blocks)


@RULES
@pytest.mark.parametrize("of", DTYPES)
def test_casts_of_special_values(of: torch.dtype, rule: str | None) -> None:
    info = torch.finfo(of)
    # A row of each alone, and squares of all of them.
    special = [math.nan, -math.nan, math.inf, -math.inf, -0.0, info.max, info.smallest_normal]
    x = matrix((len(special) + 2, 9), of)
    for row, value in enumerate(special):
        x[row, row] = value
    x[4] = -0.0
    x[6] = info.smallest_normal / torch.arange(4, 13, device=DEVICE)  # subnormal
    x[7] = info.smallest_normal * info.eps
    for dtype, blocks in product(FLOAT8_DTYPES, ((1, 4, 0, 0), (4, 4, 0, 0), (4, 4, 3, 1))):
        qdata = check(x, dtype, blocks, rule)
        check_reblock(qdata, block_exponents.portable(x, dtype, blocks, rule), blocks, 4, rule)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_exponent(dtype: torch.dtype) -> None:
    """Given ones, for all codes: products that saturate, that are subnormal, of NaN."""
    exponents = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(16, 16)
    x = matrix((16, 512), torch.float32)
    x.view(16, 16, 32)[..., :4] = torch.tensor([math.inf, -math.inf, math.nan, 2.0**127])
    blocks = (1, 32, 0, 0)
    expected = quantize_blocks.portable(x, exponents, dtype, blocks)
    check_layouts(triton.quantize_blocks(x, exponents, dtype, blocks, column_major=True), expected)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(dtype)
    for rows in (1, 32):
        check_reblock(codes.expand(256, 256), exponents.view(256, 1), (1, 256, 0, 0), rows)


@pytest.mark.parametrize("rule", [None, "ceil"])
def test_amaxes_around_each_power_of_2(rule: str | None) -> None:
    """Times the largest value, where a logarithm of fp32 may round to the power; and subnormal."""
    for dtype in FLOAT8_DTYPES:
        powers = torch.arange(-135.0, 100, device=DEVICE, dtype=torch.float64).exp2()
        bits = (torch.finfo(dtype).max * powers).to(torch.float32).view(torch.int32)[:, None]
        x = (bits + torch.arange(-50, 50, device=DEVICE)).clamp(min=0).to(torch.int32)
        x = x.view(torch.float32)
        check(x[x.isfinite().all(1)], dtype, (1, 1, 0, 0), rule)


def test_reblocked() -> None:
    cases: list[tuple[tuple[int, int], Blocks, int]] = [
        ((300, 200), (1, 128, 0, 0), 128),
        ((300, 200), (1, 32, 0, 9), 32),
        ((33, 70), (32, 32, 5, 7), 32),
        ((5, 3), (1, 128, 0, 126), 128),
        ((1, 1), (1, 1, 0, 0), 1),
    ]
    for (shape, blocks, rows), (dtype, rule) in product(cases, ((E4M3, "floor"), (E5M2, None))):
        x = matrix(shape, torch.bfloat16)
        x[0, 0] = math.nan
        exponents = block_exponents.portable(x, dtype, blocks, rule)
        qdata = quantize_blocks.portable(x, exponents, dtype, blocks)
        check_reblock(qdata, exponents, blocks, rows, rule)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32])
def test_dequantized(of: torch.dtype, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(dtype)
    exponents = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(256, 1)
    every, numbers = codes.expand(256, 256).contiguous(), exponents.view(16, 16)
    for data, scales, blocks in (
        (every, exponents, (1, 256, 0, 0)),
        (every[:, :250], numbers[:9, :9], (32, 32, 7, 30)),
        (every[:250].t(), numbers[:9, :9], (32, 32, 30, 7)),
        (every[::2, 1::2], numbers.t()[:4, :9], (32, 16, 0, 15)),
        (every[:0], numbers[:0, :8], (1, 32, 0, 0)),
    ):
        found = triton.dequantize(data, scales, blocks, of)
        assert same_values(found, dequantized(data, scales, blocks, of))


MANY: list[tuple[tuple[int, int], tuple[int, int]]] = [
    ((40, 300), (0, 0)),
    ((16, 32), (3, 31)),
    ((0, 32), (5, 0)),
    ((3, 0), (5, 7)),
    ((1, 1), (31, 0)),
    ((33, 64), (16, 16)),
]
ROUTES = pytest.mark.parametrize("route", [triton, block_operators], ids=["triton", "operators"])


@RULES
@ROUTES
@pytest.mark.parametrize("size", [(32, 32), (1, 32)])
def test_many_matrices(size: tuple[int, int], route: ModuleType, rule: str | None) -> None:
    blocks = [(*size, start[0] % size[0], start[1]) for _, start in MANY]
    chosen = [(of, slice(None)) for of in DTYPES]
    chosen += [(torch.float32, part) for part in (slice(1), slice(2, 3), slice(0, None, 5))]
    for of, part in chosen:
        tensors = [matrix(shape, of) for shape, _ in MANY]
        tensors[0][5, 7], tensors[1][3] = math.nan, -math.inf
        each = list(zip(tensors[part], blocks[part], strict=True))
        found = [block_exponents.portable(x, E4M3, b, rule) for x, b in each]
        exponents = torch.cat([one.view(-1) for one in found])
        given = tensors[part], exponents, E4M3, blocks[part]
        assert torch.equal(route.exponents_of_many(given[0], *given[2:], rule), exponents)
        data = [
            quantize_blocks.portable(x, one, E4M3, b).view(torch.uint8).view(-1)
            for (x, b), one in zip(each, found, strict=True)
        ]
        assert same_values(route.quantize_many_blocks(*given), torch.cat(data).view(E4M3))


@ROUTES
@pytest.mark.parametrize("multiple", [1, 4])
def test_scales_of_gemms(route: ModuleType, multiple: int) -> None:
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(64, 4)
    for exponents in (every, every.t(), every[:33, 1:], every[:1], every.repeat(33, 1)):
        found = route.gemm_scales(exponents, exponents, multiple)
        rows, columns = exponents.shape
        expected = torch.zeros(rows + -rows % multiple, columns, device=DEVICE)
        expected[:rows] = 2.0 ** (exponents.double() - 127)
        expected[:rows].masked_fill_(exponents == 255, math.nan)
        for scales, wanted in zip(found, (expected[:rows], expected), strict=True):
            assert scales.t().is_contiguous()
            assert same_values(scales, wanted)


def tiles(exponents: torch.Tensor, repeats: int) -> torch.Tensor:
    """Byte by byte, from the description of the layout by NVIDIA's cuBLAS documentation."""
    rows, columns = len(exponents) * repeats, exponents.shape[1]
    across = -(-columns // 4)
    expected = torch.zeros(-(-rows // 128) * across * 512, dtype=torch.uint8)
    for row, column in product(range(rows), range(columns)):
        tile = row // 128 * across + column // 4
        inside = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        expected[tile * 512 + inside] = exponents[row // repeats, column]
    return expected


@ROUTES
@pytest.mark.parametrize("repeats", [1, 32])
def test_tiles_of_exponents(route: ModuleType, repeats: int) -> None:
    a = torch.randint(1, 255, (150, 10), dtype=torch.uint8)
    b = torch.randint(1, 255, (320 // repeats, 5), dtype=torch.uint8)
    expected = tiles(a, 1), tiles(b, repeats)
    a, b = a.to(DEVICE), b.to(DEVICE)
    for of_a, of_b in ((a, b), (a.t().contiguous().t(), b.t().contiguous().t())):
        found = route.tiled_exponents(of_a, of_b, repeats)
        for mine, wanted in zip(found, expected, strict=True):
            assert torch.equal(mine.cpu(), wanted)


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((6, 32), (1, 16, 0, 0)),
        ((6, 33), (4, 8, 3, 1)),
        ((2, 3, 33), (1, 16, 0, 3)),
        ((2, 3, 33), (4, 8, 0, 0)),  # of each matrix
        ((33,), (1, 16, 0, 3)),
        ((6, 32), (1, 12, 0, 5)),  # no power of two
        ((3, 1100), (1, 1024, 0, 0)),  # larger than a tile
        ((0, 32), (1, 16, 0, 3)),
        ((0, 32), (16, 16, 3, 3)),
        ((6, 0), (1, 16, 0, 3)),
        ((0,), (1, 16, 0, 0)),
    ],
    ids=str,
)
def test_operators(shape: tuple[int, ...], blocks: Blocks) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        x = torch.randn(shape, device=DEVICE).mul_(100).to(dtype)
        check_operator(block_exponents, x, E4M3, blocks, "ceil")
        exponents = block_exponents.portable(x, E4M3, blocks, None)
        check_operator(quantize_blocks, x, exponents, E4M3, blocks)
        for transposed in ([False], [True], [False, True], [True, False]):
            check_operator(cast_blocks, x, E4M3, blocks, "ceil", transposed)
            check_operator(quantize_block_copies, x, exponents, E4M3, blocks, transposed)
        qdata = quantize_blocks.portable(x, exponents, E4M3, blocks)
        for rows, transposed in ((16, False), (16, True), (12, True)) if x.ndim == 2 else ():
            check_operator(reblock, qdata, exponents, blocks, rows, "ceil", transposed)


@pytest.mark.parametrize("size", [8, 12])
def test_a_product_without_a_gemm_of_blocks(size: int) -> None:
    operands = []
    for shape, blocks in (((33, 40), (1, size, 0, 5)), ((17, 40), (size, size, 3, 5))):
        x = torch.randn(shape, device=DEVICE)
        operands.append((*cast_blocks(x, E4M3, blocks, "ceil", [False]), blocks))
    (of_a, a, blocks_a), (of_b, b, (rows, columns, *first)) = operands
    given = a, b.t(), of_a, of_b.t(), blocks_a, (columns, rows, *first[::-1])
    for out_dtype in (torch.bfloat16, torch.float32, torch.float16):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            check_operator(block_scaled_mm, *given, out_dtype, True)


@pytest.mark.parametrize(
    "parts",
    [
        [(4, 8, 0, 0), (4, 8, 3, 1), (4, 8, 0, 7)],
        [(4, 8, 0, 0), (1, 8, 0, 1), (4, 4, 0, 0)],  # not alike
        [(3, 8, 0, 0), (3, 8, 0, 1), (3, 8, 0, 7)],
    ],
)
def test_operators_of_many(parts: list[Blocks]) -> None:
    matrices = [
        torch.randn(shape, device=DEVICE).bfloat16() for shape in ((6, 32), (0, 32), (5, 7))
    ]
    x, others = matrices[0], matrices[1:]
    blocks = [number for part in parts for number in part]
    for first in (x, x.float(), x.t().contiguous().t()):
        check_operator(block_exponents_of_each, first, others, E4M3, blocks, "ceil")
        exponents = block_exponents_of_each(first, others, E4M3, blocks, "floor")
        each = zip((first, *others), parts, strict=True)
        expected = [block_exponents(x, E4M3, b, "floor").view(-1) for x, b in each]
        assert torch.equal(exponents, torch.cat(expected))
        check_operator(quantize_blocks_of_each, first, others, exponents, E4M3, blocks)


def test_the_route_without_triton_has_the_same_layouts() -> None:
    x, blocks = matrix((6, 33), torch.bfloat16), (1, 16, 0, 3)
    expected = quantize_blocks(x, block_exponents(x, E4M3, blocks, "ceil"), E4M3, blocks)
    found = block_operators.cast_blocks(x, E4M3, blocks, "ceil", column_major=True)
    check_layouts(found[:2], expected)
    assert block_operators.cast_blocks(x, E4M3, blocks, "ceil").qdata_t is None
    alone = block_operators.quantize_blocks(x, found.exponents, E4M3, blocks, row_major=False)
    assert alone[0] is None
    of_rows = (expected, found.exponents, blocks, 4, "ceil")
    data, numbers = block_operators.reblock(*of_rows, True)
    assert same_values(data.t(), triton.reblock(*of_rows, False)[0])
    assert numbers.shape == (2, 33)
