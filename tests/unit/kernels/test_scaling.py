"""The numerics of one cast: the formula, its edges, and what is never silent."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import reference_cast, same_bits, same_cast

from fp8_dist import CastConfig, ScalingType, cast_to_float8
from fp8_dist.kernels.quantization import quantize
from fp8_dist.kernels.scale import amax, scaling_from_amax

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("target", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("power_of_2", [False, True])
def test_cast_equals_the_reference(
    target: torch.dtype, dtype: torch.dtype, power_of_2: bool
) -> None:
    config = CastConfig(target_dtype=target)
    for rows in (37, 5003) if dtype is torch.bfloat16 else (37,):  # 5003: more than two blocks hold
        # Values over the whole range of the format, subnormals and ties included.
        x = (torch.randn(rows, 29) * torch.logspace(-6, 3, 29)).to(dtype)
        cast = cast_to_float8(x, config, round_scales_to_power_of_2=power_of_2)
        values, scale = reference_cast(x, target, power_of_2)
        assert cast.scale.item() == scale
        assert torch.equal(cast.qdata.double(), values)
        assert cast.qdata.dtype is target
        assert cast.dtype is dtype
    for bad in (math.nan, math.inf, -math.inf):
        x[3, 5] = bad
        cast = cast_to_float8(x, config, round_scales_to_power_of_2=power_of_2)
        assert cast.dequantize().isnan().all()


@pytest.mark.parametrize("rows", [37, 5003])
@pytest.mark.parametrize("target", [E4M3, E5M2])
def test_too_large_a_multiplier_saturates_and_an_amax_is_fp32(
    target: torch.dtype, rows: int
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(rows, 29).to(dtype)
        found = quantize(x, torch.tensor(1e20), target).float()
        assert torch.equal(found, x.float().sign() * torch.finfo(target).max)
    config = CastConfig(target_dtype=target)
    x = torch.randn(rows, 16, dtype=torch.float64) / 100
    x[1, 1] = 1 + 2**-24
    assert same_cast(cast_to_float8(x, config), cast_to_float8(x.float(), config))
    x[1, 1] = 1e39  # inf there
    assert cast_to_float8(x, config).dequantize().isnan().all()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=8))
def test_cast_equals_the_reference_on_any_floats(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    for target in (E4M3, E5M2):
        cast = cast_to_float8(x, CastConfig(target_dtype=target))
        expected, scale = reference_cast(x, target)
        assert cast.scale.item() == scale
        assert torch.equal(cast.qdata.double(), expected)


def test_any_shape_and_strides_zeros_and_disabled_casts() -> None:
    for shape in ((), (0,), (3, 0), (5,), (2, 3, 4)):
        x = torch.randn(shape)
        cast = cast_to_float8(x, CastConfig())
        assert (cast.shape, cast.scale.shape) == (x.shape, ())
        assert torch.isfinite(cast.scale)
    x = torch.randn(16, 24)
    strided = torch.randn(16, 48)[:, ::2].copy_(x)
    for view in (x.t().contiguous().t(), strided):
        cast = cast_to_float8(view, CastConfig())
        assert same_bits(cast.qdata, cast_to_float8(x, CastConfig()).qdata)
    for x in (torch.zeros(4, 4), torch.empty(0, 4)):
        cast = cast_to_float8(x, CastConfig())
        assert torch.equal(cast.dequantize(), x)
        assert cast.scale.item() == (1 / torch.tensor(448.0 / 1e-12)).item()
    assert cast_to_float8(x, CastConfig(ScalingType.DISABLED)) is x


def test_the_bits_of_an_amax_are_non_negative() -> None:
    # The MAX all-reduce relies on their order as integers.
    negative_nan = torch.tensor([0xFFC00000], dtype=torch.int64).to(torch.int32).view(torch.float32)
    for x in (negative_nan, torch.tensor([-0.0]), torch.tensor([-2.0, 1.0])):
        assert amax(x).view(torch.int32) >= 0


@pytest.mark.parametrize("power_of_2", [False, True])
def test_the_operators_are_what_compilers_expect(power_of_2: bool) -> None:
    ops = torch.ops.fp8_dist
    x = torch.randn(5, 7)
    torch.library.opcheck(ops.amax.default, (x,))
    for dims in ([0], [1], [0, 1]):
        torch.library.opcheck(ops.amax.default, (x, dims))
    torch.library.opcheck(ops.scaling_from_amax.default, (amax(x), E4M3, power_of_2))
    multiplier, _ = scaling_from_amax(amax(x), E4M3, power_of_2)
    torch.library.opcheck(ops.quantize.default, (x.t(), multiplier, E5M2))
    rows, _ = scaling_from_amax(amax(x, [x.ndim - 1]), E4M3, power_of_2)
    torch.library.opcheck(ops.quantize.default, (x, rows, E4M3))
    a, b = (cast_to_float8(torch.randn(*s), CastConfig()) for s in ((5, 16), (16, 7)))
    arguments = (a.qdata, b.qdata, a.scale, b.scale, torch.bfloat16, [False] * 4)
    # (The schema test of opcheck multiplies its arguments, which float8 tensors can't be.)
    torch.library.opcheck(ops.scaled_mm.default, arguments, test_utils="test_faketensor")


def test_one_scale_on_a_cpu_has_the_bits_of_the_portable_formula() -> None:
    bits = torch.randint(0, 0x7F800001, (20000,), dtype=torch.int32)  # inf included
    edges = [0.0, 1e-45, 9.9e-13, 1e-12, 1.1e-12, 448.0, 57344.0, 3.4028235e38, math.inf, math.nan]
    amaxes = torch.cat([bits.view(torch.float32), torch.tensor(edges)])
    for target in (E4M3, E5M2):
        expected = scaling_from_amax.portable(amaxes, target)
        found = [scaling_from_amax(each, target) for each in amaxes]
        for numbers, tensors in zip(zip(*found, strict=True), expected, strict=True):
            assert same_bits(torch.stack(numbers), tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has", [1.0, -0.0, math.inf, -math.inf, math.nan, -math.nan])
def test_amax_and_cast_on_a_cpu_have_the_bits_of_the_portable_ones(
    dtype: torch.dtype, has: float
) -> None:
    for shape in ((7, 5), (40, 4000), (3, 200, 300), (1,)):
        x = torch.randn(shape).to(dtype)
        x.view(-1)[0] = has
        every = list(range(len(shape)))
        for dims in (None, [], every[-1:], every[:-1], every[:1], every):
            found, expected = amax(x, dims), amax.portable(x, dims)
            assert same_bits(found.nan_to_num(), expected.nan_to_num())
            assert torch.equal(found.isnan(), expected.isnan())
            m, _ = scaling_from_amax(found, E4M3)
            for saturate in (False, True):
                cast = quantize(x, m, E4M3, saturate=saturate)
                assert same_bits(cast, quantize.portable(x, m, E4M3, saturate=saturate))
                assert same_bits(cast, quantize(x, m, E4M3))


@pytest.mark.parametrize("shape", [(3, 1, 1), (3, 1, 500), (3, 200, 1), (1, 200, 1)])
def test_large_matrices_on_cpus_have_the_portable_bits(shape: tuple[int, ...]) -> None:
    x, multiplier = torch.randn(3, 200, 500), torch.rand(shape) * 500
    for view in (x, x.bfloat16(), x.mT.contiguous().mT):
        expected = quantize.portable(view, multiplier, E4M3)
        assert same_bits(quantize(view, multiplier, E4M3), expected)
        dims = [dim for dim in range(3) if shape[dim] == 1]
        assert same_bits(amax(view, dims), amax.portable(view, dims))
