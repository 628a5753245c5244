"""Functions that the Triton kernels use, in Triton's interpreter (on a GPU: compiled)."""

import math

import pytest
import torch
import triton
import triton.language as tl
from reference import same_values
from rounding_kernels import BLOCK, DEVICE, decoded, encoded

from fp8_dist.device import FLOAT8_DTYPES
from fp8_dist.gemm_table import has_gemm
from fp8_dist.kernels.cuda.triton.launch import BIAS
from fp8_dist.kernels.cuda.triton.rounding import multiplier_of, reciprocal
from fp8_dist.kernels.scale import scaling_from_amax

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy: x / 0, NaN


@triton.jit
def _scaling(amax, m, scale, size, POWER_OF_2: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = multiplier_of(tl.load(amax + n, mask=n < size, other=1.0), POWER_OF_2, BIAS)
    tl.store(m + n, found, mask=n < size)
    tl.store(scale + n, reciprocal(found), mask=n < size)


def scaling(amaxes: torch.Tensor, dtype: torch.dtype, power_of_2: bool) -> list[torch.Tensor]:
    found = [torch.empty_like(amaxes, device=DEVICE) for _ in range(2)]
    grid = (triton.cdiv(len(amaxes), BLOCK),)
    _scaling[grid](amaxes.to(DEVICE), *found, len(amaxes), power_of_2, BIAS[dtype], BLOCK)
    return [each.cpu() for each in found]


def floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def around_every_rounding(dtype: torch.dtype) -> torch.Tensor:
    """fp32 numbers at, just below and just above each value of a format and each middle of two."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()].unique()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    bits = points.view(torch.int32).to(torch.int64)
    near = torch.cat([bits - 1, bits, bits + 1])
    return floats(torch.where(near > 0x7FFFFFFF, near - 2**32, near))


def patterns() -> torch.Tensor:
    """Random fp32 numbers of all exponents, both signs, and what is special."""
    high = torch.arange(-256, 256).repeat_interleave(48) << 23
    mantissas = torch.randint(2**23, high.shape)
    mantissas[::16] &= 0x700000  # values of the formats, and middles of two of them
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1e-45, -1e-45, 3.4028235e38]
    return torch.cat([floats(high + mantissas), torch.tensor(special)])


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_soft_rounding_is_that_of_torch(dtype: torch.dtype) -> None:
    x = torch.cat([around_every_rounding(dtype), patterns()])
    limit = torch.finfo(dtype).max
    found = encoded(x, dtype).cpu()
    assert torch.equal(found, x.clamp(-limit, limit).to(dtype).view(torch.uint8))
    x = x[~(x.abs() > limit * (1 + 2**-18))]  # up to the rounded product of a cast that fits
    assert torch.equal(encoded(x, dtype, saturate=False).cpu(), x.to(dtype).view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_instruction_rounds_as_the_soft_code(dtype: torch.dtype) -> None:
    assert has_gemm("scaled", DEVICE)
    x = torch.cat([around_every_rounding(dtype), patterns()])
    soft, hard = (encoded(x, dtype, soft=soft).cpu() for soft in (True, False))
    nan = soft.view(dtype).float().isnan()
    assert torch.equal(soft[~nan], hard[~nan])
    assert hard.view(dtype).float()[nan].isnan().all()


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_soft_decoding_is_that_of_torch(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert same_values(decoded(dtype, True), codes.view(dtype).float())


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_the_formula_is_the_portable_one(dtype: torch.dtype, power_of_2: bool) -> None:
    # Where the multiplier is a power of two, and near it, where log2 in fp32 rounds up to it.
    edge = torch.tensor(torch.finfo(dtype).max).view(torch.int32).item() & 0x7FFFFF
    powers = (torch.arange(0, 255) << 23) + edge
    near = (powers[:, None] + torch.arange(-60, 61)).view(-1).clamp(min=0)
    tiny = [0.0, 1e-45, 1e-30, 9.999999e-13, 1e-12, 1.0000001e-12]
    special = torch.tensor([*tiny, 3.4028235e38, math.inf, math.nan])
    amaxes = torch.cat([floats(near), patterns().abs(), special])
    found = scaling(amaxes, dtype, power_of_2)
    for mine, portable in zip(
        found, scaling_from_amax.portable(amaxes, dtype, power_of_2), strict=True
    ):
        assert torch.equal(mine.nan_to_num(nan=-1), portable.nan_to_num(nan=-1))
