"""Casts to E2M1 against a reference by definition, and packed data."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import reference_blocks, same_bits

from fp8_dist.kernels.blocks import (
    block_exponents,
    cast_blocks,
    pack_blocks,
    quantize_block_copies,
)
from fp8_dist.kernels.e2m1 import E2M1_X2, pack_e2m1, unpack_e2m1

E4M3 = torch.float8_e4m3fn
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
Blocks = tuple[int, int, int, int]
# By their codes.
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

# Whole blocks, blocks that a size cuts, parts that begin inside of a block, matrices.
CASES: list[tuple[tuple[int, ...], Blocks]] = [
    ((64, 96), (32, 32, 0, 0)),
    ((130, 150), (128, 128, 0, 0)),
    ((33, 70), (32, 32, 7, 31)),
    ((3, 2), (32, 32, 2, 3)),
    ((1, 1), (128, 128, 5, 127)),
    ((5, 9), (1, 4, 0, 3)),
    ((3, 32, 64), (32, 32, 0, 0)),
    ((2, 33, 34), (32, 32, 3, 0)),
    ((0, 32), (32, 32, 0, 0)),
]
RULES = pytest.mark.parametrize("rule", ["ceil", "even", "floor"])


def data_of(codes: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(VALUES)
    return torch.cat([values, -values])[codes.long()].to(E4M3)


def packed_of(data: torch.Tensor) -> torch.Tensor:
    wide = data.float()
    codes = torch.bucketize(wide.abs(), torch.tensor(VALUES)) + 8 * wide.signbit()
    codes = codes.to(torch.uint8)
    return codes[..., ::2] + 16 * codes[..., 1::2]


def implementations(op: Any) -> list[Callable[..., Any]]:
    """The implementation for CPUs, the operator that graphs call, and the portable one."""
    return [op, op.overload, op.portable]


def check_cast(x: torch.Tensor, blocks: Blocks, rule: str) -> torch.Tensor:
    """Check casts and packing, with computed and with given exponents; return the exponents."""
    matrices = x.flatten(0, -3) if x.ndim > 2 else x[None]
    each = (reference_blocks(matrix, E2M1_X2, blocks, rule) for matrix in matrices)
    exponents, values = map(torch.stack, zip(*each, strict=True))
    exponents = exponents.view(*x.shape[:-2], *exponents.shape[1:])
    data = values.masked_fill(values.isnan(), 0.0).view(x.shape).to(E4M3)
    rows = data.view(-1, x.shape[-1])
    transposed = torch.zeros(x.shape[-1], len(rows) + -len(rows) % 16).to(E4M3)
    transposed[:, : len(rows)] = rows.t()
    operators = block_exponents, cast_blocks, quantize_block_copies, pack_blocks
    for measure, cast, copies, pack in zip(*map(implementations, operators), strict=True):
        results = cast(x, E2M1_X2, blocks, rule, [False, True])
        for found, expected in zip(results, (exponents, data, transposed), strict=True):
            assert same_bits(found, expected)
            assert found.is_contiguous()
        (found,) = copies(x, exponents, E2M1_X2, blocks, [True])
        assert same_bits(found, transposed)
        assert same_bits(measure(x, E2M1_X2, blocks, rule), exponents)
        if x.shape[-1] % 2 == 0:
            assert same_bits(pack(x, exponents, blocks), packed_of(data))
    return exponents


@RULES
def test_a_cast_equals_the_reference(rule: str) -> None:
    for dtype, (shape, blocks) in zip(itertools.cycle(DTYPES), CASES):
        x = torch.randn(shape) * torch.exp(3 * torch.randn(shape))
        check_cast(x.to(dtype), blocks, rule)
    x = torch.randn(33, 20)
    for view in (x.t(), x[:, ::2], x[1:, 3:-1], x[:, :1].expand(33, 20)):
        check_cast(view, (32, 32, 1, 3), rule)


@RULES
def test_every_midpoint_and_its_neighbors(rule: str) -> None:
    midpoints = [(low + high) / 2 for low, high in itertools.pairwise(VALUES)]
    x = torch.tensor([*midpoints, *VALUES, 7.0, 7.5])
    near = torch.cat([x, x.nextafter(torch.tensor(torch.inf)), x.nextafter(torch.tensor(-1.0))])
    both_signs = torch.cat([near, -near]).view(2, -1)
    for exponent in (-140, -126, -3, 0, 100, 124):
        check_cast(torch.ldexp(both_signs, torch.tensor(exponent)), (32, 128, 0, 0), rule)


@pytest.mark.parametrize(
    ("amax", "ceil", "even", "floor"),
    [
        (4.0, 127, 127, 127),
        (6.0, 127, 127, 127),
        (6.0 + 2**-21, 128, 127, 127),
        (7.0 - 2**-21, 128, 127, 127),
        (7.0, 128, 128, 127),
        (8.0 - 2**-21, 128, 128, 127),
        (8.0, 128, 128, 128),
        (1.5 * 2.0**-126, 0, 0, 0),
        (2.0**-123, 2, 2, 2),
        (2.0**-124, 1, 1, 1),
        (1.75 * 2.0**-125, 1, 1, 0),
        (1.5 * 2.0**-125, 0, 0, 0),
        (2.0**-149, 0, 0, 0),
        (0.0, 0, 0, 0),
        (2.0**127, 252, 252, 252),
        (1.75 * 2.0**127, 253, 253, 252),
        (math.inf, 255, 255, 255),
        (-math.inf, 255, 255, 255),
        (math.nan, 255, 255, 255),
    ],
)
def test_exponents_at_the_limits_of_the_rules(
    amax: float, ceil: int, even: int, floor: int
) -> None:
    x = torch.zeros(32, 32)
    x[3, 4], x[5, 6] = amax, -amax / 2
    for rule, expected in (("ceil", ceil), ("even", even), ("floor", floor)):
        assert check_cast(x, (32, 32, 0, 0), rule).item() == expected


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_a_value_that_is_not_finite_stays_in_its_block(dtype: torch.dtype) -> None:
    for value in (math.nan, -math.nan, math.inf, -math.inf):
        x = torch.randn(40, 70).to(dtype)
        x[5, 6] = value
        exponents = check_cast(x, (32, 32, 7, 31), "even")
        assert (exponents == 255).nonzero().tolist() == [[0, 1]]


def test_values_beyond_given_exponents_saturate() -> None:
    x = torch.tensor([[math.inf, -math.inf, math.nan, -9.0, 1e38, -0.0, 0.25, -0.25]])
    for byte, codes in (
        (127, [7, 15, 0, 15, 7, 8, 0, 8]),
        (0, [0, 0, 0, 8, 0, 8, 0, 8]),
        (255, [0] * 8),
        (254, [7, 15, 0, 8, 1, 8, 0, 8]),
    ):
        exponents = torch.tensor([[byte]], dtype=torch.uint8)
        (data,) = quantize_block_copies(x, exponents, E2M1_X2, (1, 8, 0, 0), [False])
        assert same_bits(data, data_of(torch.tensor([codes])))


def test_all_packed_bytes() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
    codes = torch.stack([packed % 16, packed // 16], -1).view(2, 8, 32)
    for unpack, pack in zip(implementations(unpack_e2m1), implementations(pack_e2m1), strict=True):
        for given in (packed, packed.view(torch.float4_e2m1fn_x2)):
            out = torch.full((2, 8, 32), 448.0).to(E4M3)
            unpack(given, out)
            assert same_bits(out, data_of(codes))
        assert same_bits(pack(out), packed)
        transposed = out.mT.contiguous().mT
        assert same_bits(pack(transposed), packed)
