"""The kernels for GPUs that cast in blocks, to float8 and E2M1, against the portable implementations.

In Triton's interpreter on CPUs, compiled where there is a GPU; every bit is compared.
"""

import math
from itertools import cycle, product
from operator import attrgetter
from typing import Any

import pytest
import torch
from implementations import DEVICE, check_operator, implementation, matrix, note_launches
from reference import same_bits

from fp8_dist.device import FLOAT8_DTYPES
from fp8_dist.kernels.blocks import (
    block_exponents,
    cast_blocks,
    cast_tensors_in_blocks,
    dequantize_blocks,
    exponents_shape,
    pack_blocks,
    quantize_block_copies,
    reblock,
)
from fp8_dist.kernels.cuda.triton.launch import DTYPES
from fp8_dist.kernels.e2m1 import E2M1_X2, unpack_e2m1
from fp8_dist.kernels.gemm import in_tiles

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Blocks = tuple[int, int, int, int]

# Whole blocks, blocks that a size cuts, parts that begin inside of a block or lie within one.
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
RULES: list[str | None] = [None, "ceil", "floor"]
E2M1_RULES = ["ceil", "even", "floor"]

E2M1_CASES: list[tuple[tuple[int, ...], Blocks]] = [
    ((1, 2), (32, 32, 31, 31)),
    ((17, 33), (32, 32, 0, 4)),
    ((3, 64, 96), (32, 32, 0, 0)),  # of experts
    ((2, 3, 34), (1, 32, 0, 2)),
    ((2, 33, 34), (32, 32, 0, 0)),
    ((6, 24), (1, 12, 0, 0)),
    ((0, 32), (32, 32, 0, 0)),
    ((32, 0), (32, 32, 0, 0)),
]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy: x / 0, NaN


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that are launched."""
    return note_launches(monkeypatch)


def check_casts(
    x: torch.Tensor, dtype: torch.dtype, blocks: Blocks, rule: str | None, rows: int = 32
) -> None:
    """All operators that cast in blocks, or again in other ones."""
    check_operator(block_exponents, x, dtype, blocks, rule)
    exponents = block_exponents.portable(x, dtype, blocks, rule)
    for transposed in ([False, True], [True]):
        check_operator(cast_blocks, x, dtype, blocks, rule, transposed)
        check_operator(quantize_block_copies, x, exponents, dtype, blocks, transposed)
    if dtype is E2M1_X2:
        if x.shape[-1] % 2 == 0:
            check_operator(pack_blocks, x, exponents, blocks)
            check_operator(pack_blocks, x, exponents.mT.contiguous().mT, blocks)
    elif x.ndim == 2:
        (qdata,) = quantize_block_copies.portable(x, exponents, dtype, blocks, [False])
        as_columns = qdata.t().contiguous().t(), exponents.t().contiguous().t()
        check_operator(reblock, qdata, exponents, blocks, rows, rule, False)
        check_operator(reblock, *as_columns, blocks, rows, rule, True)


@pytest.mark.full
def test_casts_of_any_shape_and_strides(used: set[str]) -> None:
    x = matrix((40, 72), torch.bfloat16)
    cases = [(matrix(shape, torch.bfloat16), blocks) for shape, blocks in CASES]
    for view in (x.t(), x[:, 1::2], x[1:, 3:-1], x[:, :1].expand(40, 72)):
        cases += [(view, (1, 32, 0, 0)), (view, (32, 32, 3, 5))]
    for (each, blocks), rule in zip(cases, cycle(RULES)):
        used.clear()
        check_casts(each, E4M3, blocks, rule)
        assert used == {"_cast_blocks", "_reblock"}
    # Of other numbers of dims, empty, and what is left to the portable implementation.
    others: list[tuple[tuple[int, ...], Blocks]] = [
        ((2, 3, 33), (1, 16, 0, 3)),
        ((2, 3, 33), (4, 8, 0, 0)),  # of each matrix
        ((33,), (1, 16, 0, 3)),
        ((6, 32), (1, 12, 0, 5)),  # no power of two
        ((3, 1100), (1, 1024, 0, 0)),  # larger than a tile
        ((0, 32), (1, 16, 0, 3)),
        ((0, 32), (16, 16, 3, 3)),
        ((6, 0), (1, 16, 0, 3)),
        ((0,), (1, 16, 0, 0)),
    ]
    each = product(others, (torch.bfloat16, torch.float64))
    for ((shape, blocks), dtype), rule in zip(each, cycle(RULES)):
        check_casts(matrix(shape, dtype), E4M3, blocks, rule, 12 if shape == (6, 32) else 16)
    # To E2M1; some pairs begin inside of what a kernel takes.
    cases += [(matrix(shape, torch.bfloat16), blocks) for shape, blocks in E2M1_CASES]
    cases += [(matrix((64, 32), torch.float64), (32, 32, 0, 0))]
    for (each, blocks), rule in zip(cases, cycle(E2M1_RULES)):
        check_casts(each, E2M1_X2, blocks, rule)


@pytest.mark.parametrize(
    ("of", "rule"),
    [(torch.bfloat16, None), (torch.float16, "ceil"), (torch.float32, "floor")],
)
def test_casts_of_special_values(used: set[str], of: torch.dtype, rule: str | None) -> None:
    info = torch.finfo(of)
    # A row of each alone, and squares of all of them.
    special = [math.nan, -math.nan, math.inf, -math.inf, -0.0, info.max, info.smallest_normal]
    x = matrix((len(special) + 2, 9), of)
    for row, value in enumerate(special):
        x[row, row] = value
    x[4] = -0.0
    x[6] = info.smallest_normal / torch.arange(4, 13, device=DEVICE)  # subnormal
    x[7] = info.smallest_normal * info.eps
    for blocks in ((1, 4, 0, 0), (4, 4, 0, 0), (4, 4, 3, 1)):
        check_casts(x, E4M3, blocks, rule, 4)
        check_casts(x, E2M1_X2, blocks, rule or "even")
    for dtype in FLOAT8_DTYPES[1:]:
        check_casts(x, dtype, (4, 4, 3, 1), rule, 4)


# Blocks; shapes of tensors: several tiles, parts of blocks, one row, none, of experts.
MANY: list[tuple[Blocks, list[tuple[int, ...]]]] = [
    ((1, 32, 0, 0), [(77, 130), (1, 300), (0, 6), (16, 64), (5, 0), (2, 5, 48), (3, 2)]),
    ((128, 128, 0, 0), [(260, 300), (1, 300), (0, 6), (16, 64), (5, 0), (2, 128, 48), (3, 2)]),
    ((32, 32, 3, 8), [(77, 130), (16, 64), (1, 2)]),
]


@pytest.mark.parametrize(("of", "rule"), [*zip(DTYPES, RULES, strict=True)])
def test_many_tensors_are_cast_as_each_of_them(
    used: set[str], of: torch.dtype, rule: str | None
) -> None:
    for (blocks, shapes), dtype in product(MANY, (E4M3, E5M2, E2M1_X2)):
        rule = (rule or "even") if dtype is E2M1_X2 else rule
        tensors = [matrix(shape, of) for shape in shapes]
        tensors[0].view(-1)[:4] = torch.tensor([math.nan, -math.inf, -math.nan, -0.0])
        tensors[1][0, -1] = math.inf
        runs: list[Any] = [implementation, attrgetter("portable")]
        for run, each in product(runs, (tensors, tensors[1:2], [x[1:] for x in tensors])):
            used.clear()
            many, (first, *others) = run(cast_tensors_in_blocks), each
            exponents = many(first, others, None, dtype, blocks, rule=rule)
            parts = [run(block_exponents)(x, dtype, blocks, rule) for x in each]
            assert torch.equal(exponents, torch.cat([part.view(-1) for part in parts]))
            alone = [
                run(quantize_block_copies)(x, part, dtype, blocks, [False])[0]
                for x, part in zip(each, parts, strict=True)
            ]
            data = many(first, others, exponents, dtype, blocks)
            assert torch.equal(data, torch.cat([x.view(torch.uint8).view(-1) for x in alone]))
            if dtype is E2M1_X2:
                data = many(first, others, exponents, dtype, blocks, packed=True)
                alone = [run(pack_blocks)(x, p, blocks) for x, p in zip(each, parts, strict=True)]
                assert torch.equal(data, torch.cat([x.view(-1) for x in alone]))
            assert used == ({"_cast_blocks"} if run is implementation else set())


def test_what_is_left_to_casts_of_each_tensor(used: set[str]) -> None:
    """Tensors of several dtypes or strides, of blocks that cut matrices, and odd columns to pack."""
    x, odd = matrix((32, 64), torch.bfloat16), matrix((2, 33, 65), torch.bfloat16)
    for others, blocks in (
        ([x.float()], (32, 32, 0, 0)),
        ([x.t()], (32, 32, 0, 0)),
        ([odd], (32, 32, 0, 0)),
        ([x], (6, 12, 0, 0)),
    ):
        check_operator(cast_tensors_in_blocks, x, others, None, E4M3, blocks, rule="ceil")
        exponents = cast_tensors_in_blocks.portable(x, others, None, E4M3, blocks, rule="ceil")
        check_operator(cast_tensors_in_blocks, x, others, exponents, E4M3, blocks)
    one_per_row = torch.zeros(66, dtype=torch.uint8, device=DEVICE), E2M1_X2, (1, 128, 0, 0)
    with pytest.raises(RuntimeError):
        implementation(cast_tensors_in_blocks)(odd, [], *one_per_row, packed=True)


@pytest.mark.full
@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_every_exponent(used: set[str], dtype: torch.dtype) -> None:
    """Cast with each given exponent: products saturate, are subnormal, or are NaN."""
    exponents = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(16, 16)
    x = matrix((16, 512), torch.float32)
    x.view(16, 16, 32)[..., :4] = torch.tensor([math.inf, -math.inf, math.nan, 2.0**127])
    check_operator(quantize_block_copies, x, exponents, dtype, (1, 32, 0, 0), [False, True])
    check_operator(pack_blocks, x, exponents, (1, 32, 0, 0))
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(dtype).expand(256, 256)
    check_operator(reblock, codes, exponents.view(256, 1), (1, 256, 0, 0), 32, None, True)


@pytest.mark.parametrize("rule", [None, "ceil"])
def test_amaxes_around_each_power_of_2(used: set[str], rule: str | None) -> None:
    """Include amaxes for which log2 in fp32 may round to the power, and subnormal ones."""
    for dtype in FLOAT8_DTYPES:
        powers = torch.arange(-135.0, 100, device=DEVICE, dtype=torch.float64).exp2()
        bits = (torch.finfo(dtype).max * powers).to(torch.float32).view(torch.int32)[:, None]
        x = (bits + torch.arange(-50, 50, device=DEVICE)).clamp(min=0).to(torch.int32)
        x = x.view(torch.float32)
        x = x[x.isfinite().all(1)]
        check_operator(block_exponents, x, dtype, (1, 1, 0, 0), rule)
        check_operator(cast_blocks, x, dtype, (1, 1, 0, 0), rule, [False, True])


def test_reblocked(used: set[str]) -> None:
    cases: list[tuple[tuple[int, int], Blocks, int]] = [
        ((140, 200), (1, 128, 0, 0), 128),
        ((140, 70), (1, 32, 0, 9), 32),
        ((33, 70), (32, 32, 5, 7), 32),
        ((5, 3), (1, 128, 0, 126), 128),
        ((1, 1), (1, 1, 0, 0), 1),
    ]
    for (shape, blocks, rows), (dtype, rule) in product(cases, ((E4M3, "floor"), (E5M2, None))):
        x = matrix(shape, torch.bfloat16)
        x[0, 0] = math.nan
        exponents = block_exponents.portable(x, dtype, blocks, rule)
        (qdata,) = quantize_block_copies.portable(x, exponents, dtype, blocks, [False])
        for transposed in (False, True):
            check_operator(reblock, qdata, exponents, blocks, rows, rule, transposed)
    assert used == {"_reblock"}


@pytest.mark.parametrize(
    ("dtype", "rule"),
    [*((E4M3, rule) for rule in RULES), *((dtype, "ceil") for dtype in FLOAT8_DTYPES[1:])],
)
def test_every_code_and_exponent_reblocked(
    used: set[str], dtype: torch.dtype, rule: str | None
) -> None:
    """Each value is a new block, whose exponent the kernel finds without a division.

    Those of positive codes, and of the first negative one: -0, or the NaN of some formats.
    """
    codes = torch.arange(1, 129, dtype=torch.uint8, device=DEVICE).view(dtype)
    exponents = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(256, 1)
    check_operator(reblock, codes.repeat(256, 1), exponents, (1, 128, 0, 0), 1, rule, False)
    assert used == {"_reblock"}


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32])
def test_dequantized(used: set[str], wide: torch.dtype, dtype: torch.dtype) -> None:
    """Every code with every exponent, then blocks of all kinds."""
    # (The interpreter's cast to bf16 changes subnormals.)
    least = 32 if wide is torch.bfloat16 else 0
    exponents = torch.arange(least, 256, dtype=torch.uint8, device=DEVICE).view(-1, 1)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(256, 1)
    args = codes[least:].view(dtype), exponents, (1, 256, 0, 0), wide
    check_operator(dequantize_blocks, *args)
    for (rows, columns), blocks in [*CASES, ((0, 32), (1, 16, 0, 3)), ((6, 0), (16, 16, 3, 3))]:
        data = torch.randint(256, (rows, columns), dtype=torch.uint8, device=DEVICE).view(dtype)
        shape = exponents_shape(data.shape, blocks)
        scales = torch.randint(64, 255, shape, dtype=torch.uint8, device=DEVICE)
        for each in (scales, scales.t().contiguous().t()):
            check_operator(dequantize_blocks, data, each, blocks, wide)
    assert used == {"_cast_blocks"}


def test_tiles_of_exponents() -> None:
    """Byte by byte, from the description of the layout by NVIDIA's cuBLAS documentation."""
    for shape in ((150, 10), (320, 5)):
        exponents = torch.randint(1, 255, shape, dtype=torch.uint8)
        rows, columns = shape
        across = -(-columns // 4)
        expected = torch.zeros(-(-rows // 128) * across * 512, dtype=torch.uint8)
        for row, column in product(range(rows), range(columns)):
            tile = row // 128 * across + column // 4
            inside = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            expected[tile * 512 + inside] = exponents[row, column]
        for each in (exponents, exponents.t().contiguous().t()):
            assert torch.equal(in_tiles(each), expected)


@pytest.mark.parametrize("rule", E2M1_RULES)
def test_e2m1_around_each_midpoint_and_limit(rule: str) -> None:
    """Also times the smallest and the largest powers of two."""
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 8.0], device=DEVICE)
    bits = middle.view(torch.int32)[:, None] + torch.arange(-2, 3, device=DEVICE)
    near = bits.to(torch.int32).view(torch.float32).flatten()
    powers = torch.tensor([-146.0, -130, -128, -126, -124, -3, 0, 90, 124], device=DEVICE)
    x = (near * powers.double().exp2()[:, None]).float()
    x = torch.cat([x, -x])
    for blocks in ((1, 1, 0, 0), (1, 32, 0, 2), (1, 64, 0, 0)):
        check_casts(x, E2M1_X2, blocks, rule)


def test_all_packed_bytes(used: set[str]) -> None:
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(4, 64)
    memory = torch.zeros(600, dtype=torch.uint8, device=DEVICE)
    for packed in (every, every.view(torch.float4_e2m1fn_x2), every[:1], every[1:2, :3], every[:0]):
        count = 2 * packed.numel()
        expected = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=E4M3)
        unpack_e2m1.portable(packed.cpu(), expected)
        for offset, names in ((0, {"_unpack_e2m1"}), (2, {"_unpack_e2m1"}), (1, set())):
            used.clear()
            memory.fill_(1)
            out = memory[offset : offset + count].view(E4M3).view(expected.shape)
            implementation(unpack_e2m1)(packed, out)
            assert same_bits(out.cpu(), expected)
            assert (memory[offset + count :] == 1).all()
            assert used == (names if count else set())
