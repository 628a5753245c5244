"""The kernels that encode and sum what travels, against the portable implementations, bit by bit.

In Triton's interpreter on CPUs, compiled where there is a GPU.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import implementation
from reference import same_values

from fp8_dist.kernels import encoding as portable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy: int32 overflows


def numbers(shape: tuple[int, ...], dtype: torch.dtype, spread: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = (x * torch.exp(spread * torch.randn(shape, generator=generator))).to(dtype)
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-30], dtype=dtype)
    place = torch.randint(40, shape, generator=generator)
    return torch.where(place < 7, special[place.clamp(max=6)], x).to(DEVICE)


@settings(deadline=None, max_examples=15)
@given(
    rows=st.integers(0, 3),
    size=st.integers(0, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spread=st.floats(0, 20),
    seed=st.integers(0, 2**31 - 1),
)
def test_codes_and_exponents(
    rows: int, size: int, dtype: torch.dtype, spread: float, seed: int
) -> None:
    x = numbers((rows, size), dtype, spread, seed)
    expected = portable.encode_float8.portable(x)
    found = implementation(portable.encode_float8)(x)
    assert all(map(same_values, found, expected))
    one_row = [tensor.unsqueeze(0) for tensor in expected]
    decoded = implementation(portable.sum_of_rows)(*one_row, None, -1)
    assert same_values(decoded, portable.decode_float8(*expected))


def test_views() -> None:
    x = numbers((2, 3, 130), torch.float32, 2, 0)
    views = (x[..., 3:100], x.transpose(0, 1), x.transpose(1, 2), x[:, 0], x[0, 0], x[:0])
    for view in views:
        expected = portable.encode_float8.portable(view)
        assert all(map(same_values, implementation(portable.encode_float8)(view), expected))


@pytest.mark.parametrize("shape", [(1, 200), (3, 2, 129), (4, 5), (3, 0), (3, 0, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = numbers(shape, dtype, 2, 3)
    codes, exponents = portable.encode_float8.portable(x)
    wire = torch.cat([codes, exponents], -1)
    # Codes and exponents as views of one row of bytes.
    views = wire.split([codes.shape[-1], exponents.shape[-1]], -1)
    for rank in (0, 2, -1):
        own = x[min(rank, shape[0] - 1)] if shape[0] > 1 or rank < 2 else None
        expected = portable.sum_of_rows.portable(codes, exponents, own, rank)
        for summands in ((codes, exponents), views):
            found = implementation(portable.sum_of_rows)(*summands, own, rank)
            assert same_values(found, expected)
        expected = portable.sum_of_rows.portable(x, None, own, rank)
        for mine in (own, own if own is None else own.float()):
            found = implementation(portable.sum_of_rows)(x, None, mine, rank)
            assert same_values(found, expected)
