"""The kernels' float8 conversions, by integer arithmetic ("soft") and by GPU instructions."""

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton.launch import BIAS
from fp8_dist.kernels.cuda.triton.rounding import from_float8, saturated, to_float8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 8192


@triton.jit
def _encode(x, out, size, SATURATE: tl.constexpr, BIAS: tl.constexpr, SOFT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + n, mask=n < size)
    if SATURATE:
        v = saturated(v, BIAS)
    tl.store(out + n, to_float8(v, BIAS, SOFT), mask=n < size)


@triton.jit
def _decode(codes, out, BIAS: tl.constexpr, SOFT: tl.constexpr):
    n = tl.arange(0, 256)
    tl.store(out + n, from_float8(tl.load(codes + n), BIAS, SOFT))


def encoded(
    x: torch.Tensor, dtype: torch.dtype, *, saturate: bool = True, soft: bool = True
) -> torch.Tensor:
    """The float8 codes of fp32 numbers, on `DEVICE`."""
    out = torch.empty(x.shape, dtype=torch.uint8, device=DEVICE)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    _encode[grid](x.to(DEVICE), out, x.numel(), saturate, BIAS[dtype], soft, BLOCK)
    return out


def decoded(dtype: torch.dtype, soft: bool) -> torch.Tensor:
    """The numbers of all 256 codes, on `DEVICE`."""
    out = torch.empty(256, device=DEVICE)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    _decode[(1,)](codes, out, BIAS[dtype], soft)
    return out
