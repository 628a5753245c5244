"""The kernels for GPUs that cast to E2M1 and unpack it, against the portable implementations.

In Triton's interpreter on CPUs, compiled where there is a GPU; every bit is compared.
"""

import math
from itertools import cycle, product
from typing import Any

import pytest
import torch
from implementations import DEVICE, implementation, matrix, note_launches
from reference import same_bits

from fp8_dist.kernels import (
    E2M1_X2,
    CustomOp,
    block_exponents,
    cast_blocks,
    pack_blocks,
    quantize_block_copies,
    unpack_e2m1,
)

E4M3 = torch.float8_e4m3fn
Blocks = tuple[int, int, int, int]

CASES: list[tuple[tuple[int, ...], Blocks]] = [
    ((64, 160), (32, 32, 0, 0)),
    ((140, 262), (128, 128, 0, 0)),
    ((70, 200), (32, 32, 7, 30)),
    ((3, 2), (128, 128, 2, 100)),
    ((1, 2), (32, 32, 31, 31)),  # its pairs are left to the portable implementation
    ((17, 33), (32, 32, 0, 4)),
    ((3, 64, 96), (32, 32, 0, 0)),  # of experts
    ((2, 3, 34), (1, 32, 0, 2)),
]
RULES = ["ceil", "even", "floor"]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy: overflow, NaN


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that are launched."""
    return note_launches(monkeypatch)


def check(op: CustomOp[..., Any], x: torch.Tensor, *args: Any) -> Any:
    """Compare results, zeros and their signs included; what the portable implementation returns."""
    found = implementation(op)(x, *args)
    on_cpu = (each.cpu() if isinstance(each, torch.Tensor) else each for each in args)
    expected = op.portable(x.cpu(), *on_cpu)
    pairs = (
        [(found, expected)]
        if isinstance(found, torch.Tensor)
        else zip(found, expected, strict=True)
    )
    assert all(same_bits(a.cpu(), b) for a, b in pairs)
    return expected


def check_all(x: torch.Tensor, blocks: Blocks, rule: str) -> None:
    """Exponents alone, copies, and packed data; with exponents that are computed or given."""
    exponents = check(block_exponents, x, E2M1_X2, blocks, rule).to(DEVICE)
    check(cast_blocks, x, E2M1_X2, blocks, rule, [False, True])
    check_given(x, exponents, blocks)
    check_given(x, exponents.mT.contiguous().mT, blocks)


def check_given(x: torch.Tensor, exponents: torch.Tensor, blocks: Blocks) -> None:
    check(quantize_block_copies, x, exponents, E2M1_X2, blocks, [False, True])
    if x.shape[-1] % 2 == 0:
        check(pack_blocks, x, exponents, blocks)


def test_casts_of_any_shape_and_strides(used: set[str]) -> None:
    dtypes = cycle([torch.bfloat16, torch.float16, torch.float32])
    for (shape, blocks), dtype, rule in zip(CASES, dtypes, cycle(RULES[::-1])):
        used.clear()
        check_all(matrix(shape, dtype), blocks, rule)
        assert used == {"_cast_blocks"}
    x = matrix((40, 72), torch.bfloat16)
    views = (x.t(), x[:, 1::2], x[1:, 3:-1], x[:, :1].expand(40, 72))
    for view, rule in zip(views, cycle(RULES)):
        check_all(view, (32, 32, 3, 6), rule)


def test_what_is_left_to_the_portable_implementation(used: set[str]) -> None:
    for x, blocks in (
        (matrix((2, 33, 34), torch.bfloat16), (32, 32, 0, 0)),  # no whole blocks
        (matrix((64, 32), torch.float64), (32, 32, 0, 0)),
        (matrix((6, 24), torch.bfloat16), (1, 12, 0, 0)),  # no power of two
        (matrix((0, 32), torch.bfloat16), (32, 32, 0, 0)),
        (matrix((32, 0), torch.bfloat16), (32, 32, 0, 0)),
    ):
        check_all(x, blocks, "even")
    x = matrix((4, 8), torch.float32)
    exponents = block_exponents.portable(x.cpu(), E2M1_X2, (32, 32, 1, 3), "even").to(DEVICE)
    check(pack_blocks, x, exponents, (32, 32, 1, 3))
    assert used == set()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_special_values(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    special = [math.nan, -math.nan, math.inf, -math.inf, -0.0, info.max, info.smallest_normal]
    x = matrix((len(special) + 1, 10), dtype)
    for row, value in enumerate(special):
        x[row, row] = value
    x[4] = -0.0
    x[6] = -info.smallest_normal / torch.arange(4, 14, device=DEVICE)  # subnormal
    x[7] = info.smallest_normal * info.eps
    for blocks, rule in product(((1, 4, 0, 0), (4, 4, 3, 2)), RULES):
        check_all(x, blocks, rule)


def test_every_exponent() -> None:
    exponents = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(16, 16)
    x = matrix((16, 512), torch.float32)
    x.view(16, 16, 32)[..., :4] = torch.tensor([math.inf, -math.inf, math.nan, 2.0**127])
    check_given(x, exponents, (1, 32, 0, 0))


@pytest.mark.parametrize("rule", RULES)
def test_around_each_midpoint_and_limit(rule: str) -> None:
    """Also times the smallest and the largest powers of two."""
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 8.0], device=DEVICE)
    bits = middle.view(torch.int32)[:, None] + torch.arange(-2, 3, device=DEVICE)
    near = bits.to(torch.int32).view(torch.float32).flatten()
    powers = torch.tensor([-146.0, -130, -128, -126, -124, -3, 0, 90, 124], device=DEVICE)
    x = (near * powers.double().exp2()[:, None]).float()
    x = torch.cat([x, -x])
    for blocks in ((1, 1, 0, 0), (1, 32, 0, 2), (1, 64, 0, 0)):
        check_all(x, blocks, rule)


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
