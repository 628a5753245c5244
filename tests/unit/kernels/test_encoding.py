"""Numbers as they travel: float8 codes with exponents of blocks, and rows."""

import functools
import math

import pytest
import torch
from gradient_wire import on_the_wire
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import float8_grid

from fp8_dist.kernels.encoding import decode_float8, encode_float8, pack_rows, sum_of_rows
from fp8_dist.transport import Encoding, Part, decode, encode, runs_of

INF, NAN = math.inf, math.nan


def arrived(x: torch.Tensor) -> torch.Tensor:
    codes, exponents = encode_float8(x)
    assert codes.dtype is exponents.dtype is torch.uint8
    assert codes.shape == x.shape
    assert exponents.shape == (*x.shape[:-1], -(-x.shape[-1] // 128))
    found = decode_float8(codes, exponents)
    assert found.shape == x.shape
    return found


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 400),
    spread=st.floats(0, 12),
    exponent=st.integers(-140, 120),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31 - 1),
)
def test_float8_equals_the_reference(
    size: int, spread: float, exponent: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator, dtype=torch.float64)
    x = x * torch.exp(spread * torch.randn(size, generator=generator, dtype=torch.float64))
    x = (x * 2.0**exponent).float().clamp(-1e38, 1e38).to(dtype).clamp(-60000, 60000)
    assert torch.equal(arrived(x), on_the_wire(x.float(), "float8"))


def test_values_between_two_codes_and_the_largest_ones() -> None:
    grid = torch.tensor(float8_grid(torch.float8_e4m3fn))
    between = (grid[1:] + grid[:-1]) / 2
    for part in between.split(127):
        x = torch.cat([part, torch.tensor([448.0])])  # the largest fixes the scale at 1
        assert torch.equal(arrived(x), on_the_wire(x, "float8"))
    for largest in (448.0, 448.5, 896.0, 896.5, 2.0**-126, 3.0e38, 1e-45):  # none saturates
        for x in (torch.tensor([largest]), torch.tensor([-largest])):
            assert torch.equal(arrived(x), on_the_wire(x, "float8"))
    limit = 248 * 2.0**120
    assert arrived(torch.tensor([limit])).item() == INF
    assert arrived(torch.tensor([limit * (1 - 2.0**-20)])).item() == 240 * 2.0**120


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_others_than_finite_values_arrive_and_change_no_other_one(dtype: torch.dtype) -> None:
    x = torch.randn(3, 300).to(dtype)
    special = x.clone()
    special[0, :4] = torch.tensor([NAN, INF, -INF, -NAN])
    special[2, 299] = INF
    others = special.isfinite()
    expected = arrived(torch.where(others, special, 0))
    found = arrived(special)
    assert torch.equal(found[others], expected[others])
    assert found[0, [0, 3]].isnan().all()
    assert [*found[0, 1:3].tolist(), found[2, 299].item()] == [INF, -INF, INF]


def test_zeros_shapes_and_strides() -> None:
    x = torch.zeros(2, 200)
    x[1] = -0.0
    found = arrived(x)
    assert torch.equal(found, torch.zeros(2, 200))
    assert not found.signbit().any()
    tiny = torch.tensor([-1e-30, 448.0])  # a value that rounds to -0 is no NaN
    assert arrived(tiny).tolist() == [0.0, 448.0]
    for shape in ((0,), (3, 0), (0, 5), (2, 3, 129), (128,)):
        arrived(torch.randn(shape))
    x = torch.randn(300, 4).t()
    for view in (x, x[:, 7:290]):
        assert torch.equal(arrived(view), arrived(view.contiguous()))


@pytest.mark.parametrize(("ranks", "own"), [(1, 0), (4, 2), (35, 16), (3, -1)])
def test_the_sum_is_in_fp32_in_the_order_of_ranks(ranks: int, own: int) -> None:
    x = torch.randn(ranks, 2, 200) * torch.logspace(4, -4, ranks).view(ranks, 1, 1)
    codes, exponents = encode_float8(x)
    values = [*decode_float8(codes, exponents)]
    if own < 0:
        values.insert(0, x[own])
    else:
        values[own] = x[own]
    expected = functools.reduce(torch.add, values)
    assert torch.equal(sum_of_rows(codes, exponents, x[own], own), expected)
    zeros = torch.full((ranks, 3), -0.0)  # torch's sum of these is -0 too
    assert sum_of_rows(zeros, None, None, 0).signbit().all()


def parts_of(*sizes_and_encodings: tuple[int, Encoding]) -> list[Part]:
    return [Part(*each) for each in sizes_and_encodings]


def test_runs_keep_blocks_inside_of_parts() -> None:
    parts = parts_of((256, "float8"), (128, "float8"), (3, None), (0, "float8"), (5, None))
    parts += parts_of((60, "float8"), (128, "float8"), (1, "bf16"), (2, "bf16"))
    expected = (384, "float8"), (8, None), (60, "float8"), (128, "float8"), (3, "bf16")
    assert runs_of(parts) == tuple(parts_of(*expected))
    rows = [Part(192, "float8", 96), Part(288, "float8", 96), Part(512, "float8", 256)]
    assert runs_of(rows) == (Part(480, "float8", 96), Part(512, "float8"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    x = torch.randn(8, 300)
    x[::2] = 0.0
    x[1] = 1.0
    expected = encode_float8(x)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = encode_float8(x)
    finally:
        torch.set_default_dtype(default)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(decode_float8(*found)[::2], x[::2])
    assert torch.equal(decode_float8(*found)[1], x[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_bytes(dtype: torch.dtype) -> None:
    runs = runs_of(parts_of((200, "float8"), (7, None), (9, "bf16"), (128, "float8"), (1, None)))
    x = torch.randn(3, 2, 345).to(dtype)
    wire = encode(x, runs, dtype)
    assert wire.shape == (3, 2, sum(run.bytes(dtype) for run in runs))
    found = decode(wire, runs, dtype)
    assert found.dtype is torch.float32
    for row, whole in zip(found.flatten(0, 1), x.flatten(0, 1), strict=True):
        expected = whole.float().clone()
        expected[:200] = on_the_wire(whole[:200], "float8")
        expected[207:216] = on_the_wire(whole[207:216], "bf16")
        expected[216:344] = on_the_wire(whole[216:344], "float8")
        assert torch.equal(row, expected)


def test_rows_of_bytes_that_are_not_aligned_or_of_another_dtype() -> None:
    runs = runs_of(parts_of((200, "float8"), (7, None), (9, "bf16")))  # 202 bytes, then 28
    for shape in ((1,), (1, 1), (2, 1)):
        x = torch.randn(*shape, 216)
        found = decode(encode(x, runs, torch.float32), runs, torch.float32)
        assert torch.equal(found[..., 200:207], x[..., 200:207])
        assert torch.equal(found[..., 207:], x[..., 207:].bfloat16().float())
    runs, x = runs_of(parts_of((128, "float8"), (5, None))), torch.randn(2, 133)
    wire = encode(x, runs, torch.bfloat16)
    assert wire.shape == (2, 129 + 10)
    assert torch.equal(decode(wire, runs, torch.bfloat16)[:, 128:], x[:, 128:].bfloat16().float())


def test_fake_tensors_have_the_same_shapes() -> None:
    x = torch.randn(3, 200)
    codes, exponents = encode_float8(x)
    for op, arguments in (
        (encode_float8, (x,)),
        (sum_of_rows, (codes, exponents, x[1], 1)),
        (pack_rows, (codes, [exponents, codes])),
        (sum_of_rows, (x, None, x[1], 1)),
    ):
        torch.library.opcheck(op.overload, arguments)
