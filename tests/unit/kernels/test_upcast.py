"""The fast conversion of float8 data on CPUs: equal to torch's for every code."""

import pytest
import torch
from reference import same_bits

from fp8_dist.kernels.cpu import upcast

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
FNUZ = dict(zip(DTYPES, (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), strict=True))
WIDE = [torch.bfloat16, torch.float32, torch.float64]


def every_code(dtype: torch.dtype, finite: bool) -> torch.Tensor:
    """Every code, as ``[256 or fewer, 128]``: too many elements to leave to torch's conversion."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    if finite:
        codes = torch.arange(256, dtype=torch.uint8)[codes.float().isfinite()].view(dtype)
    return codes.view(torch.uint8).repeat(128, 1).t().view(dtype)


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code(dtype: torch.dtype, wide: torch.dtype) -> None:
    for codes in (every_code(dtype, True), every_code(dtype, False)):
        for qdata in (codes, codes.t(), codes[:, ::2], codes.contiguous()):
            found = upcast(qdata, wide)
            assert found.dtype is wide
            assert same_bits(found.nan_to_num(), qdata.to(wide).nan_to_num())
            assert torch.equal(found.isnan(), qdata.to(wide).isnan())
    for each in (codes, codes.view(FNUZ[dtype])):  # each way gives the same bits to a NaN
        assert same_bits(upcast(each, wide), upcast(upcast(each, torch.bfloat16), wide))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_finite_code_where_subnormal_numbers_are_flushed(dtype: torch.dtype) -> None:
    codes = every_code(dtype, True)
    before = codes.view(torch.uint8).clone()
    expected = codes.to(torch.bfloat16)
    if torch.set_flush_denormal(True):  # (Some CPUs can't.)
        try:
            found = upcast(codes, torch.bfloat16)
        finally:
            torch.set_flush_denormal(False)
        assert same_bits(found, expected)
    upcast(codes, torch.bfloat16).zero_()
    assert torch.equal(codes.view(torch.uint8), before)  # the data stays as it is
