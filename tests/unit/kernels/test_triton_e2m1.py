"""The kernels for GPUs that cast to E2M1 and unpack it, against the portable implementations.

In Triton's interpreter on CPUs, compiled where there is a GPU; every bit is compared.
"""

import math
from itertools import cycle, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import DEVICE, implementation, matrix, note_launches
from reference import same_bits

from fp8_dist.kernels import cast_e2m1, unpack_e2m1

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


def check(
    x: torch.Tensor,
    exponents: torch.Tensor | None,
    blocks: Blocks,
    rule: str,
    transposed: list[bool],
    packs: bool = False,
) -> list[torch.Tensor]:
    """Compare a cast, zeros and their signs included; what the portable implementation returns."""
    found = implementation(cast_e2m1)(x, exponents, blocks, rule, transposed, packs)
    given = None if exponents is None else exponents.cpu()
    expected = cast_e2m1.portable(x.cpu(), given, blocks, rule, transposed, packs)
    assert len(found) == len(expected)
    assert all(same_bits(a.cpu(), b) for a, b in zip(found, expected, strict=True))
    return expected


def check_all(x: torch.Tensor, blocks: Blocks, rule: str) -> None:
    """Exponents alone, each copy, and packed data; with exponents that are computed or given."""
    (exponents,) = check(x, None, blocks, rule, [])
    exponents = exponents.to(DEVICE)
    assert check(x, exponents, blocks, rule, []) == []
    check(x, None, blocks, rule, [False, True])
    check(x, exponents, blocks, rule, [True])
    check(x, exponents.mT.contiguous().mT, blocks, rule, [False])
    if x.shape[-1] % 2 == 0:
        check(x, None, blocks, rule, [], packs=True)
        check(x, exponents, blocks, rule, [], packs=True)


def test_casts_of_any_shape_and_strides(used: set[str]) -> None:
    dtypes = cycle([torch.bfloat16, torch.float16, torch.float32])
    for (shape, blocks), dtype, rule in zip(CASES, dtypes, cycle(RULES[::-1])):
        used.clear()
        check_all(matrix(shape, dtype), blocks, rule)
        assert used == {"_cast_e2m1"}
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
    check(x, None, (32, 32, 1, 3), "even", [], packs=True)
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
    check(x, exponents, (1, 32, 0, 0), "floor", [False, True])
    check(x, exponents, (1, 32, 0, 0), "floor", [], packs=True)


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
        check(x, None, blocks, rule, [False])
        check(x, None, blocks, rule, [], packs=True)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=12, max_size=12),
    st.sampled_from([(1, 2), (2, 2), (4, 4)]),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.sampled_from(RULES),
)
def test_casts_of_any_floats(
    values: list[float], size: tuple[int, int], start: tuple[int, int], rule: str
) -> None:
    x = torch.tensor(values, dtype=torch.float32, device=DEVICE).view(3, 4)
    blocks = (*size, start[0] % size[0], start[1] % size[1])
    check(x, None, blocks, rule, [False, True])
    check(x, None, blocks, rule, [], packs=True)


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
