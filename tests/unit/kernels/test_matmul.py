"""The scaled GEMM: exactness of the emulation, shapes, alignment."""

import math
import os
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from gemm_records import record_gemms, scaled_mm
from processes import run
from reference import all_warnings, raised, same_bits, sqnr

from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8Tensor,
    ScalingGranularity,
    cast_to_float8,
    torch_internals,
)
from fp8_dist.kernels import cpu, gemm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)


def operands(
    m: int, k: int, n: int, left: torch.dtype = E4M3, right: torch.dtype = E4M3
) -> tuple[Float8Tensor, Float8Tensor]:
    a = cast_to_float8(torch.randn(m, k), CastConfig(target_dtype=left))
    b = cast_to_float8(torch.randn(n, k), CastConfig(target_dtype=right)).t()
    return a, b


def fp64(a: Float8Tensor, b: Float8Tensor) -> torch.Tensor:
    return (a.qdata.double() * a.scale.double()) @ (b.qdata.double() * b.scale.double())


@pytest.mark.parametrize("left", [E4M3, E5M2])
@pytest.mark.parametrize("right", [E4M3, E5M2])
def test_products_are_exact_up_to_the_last_rounding(left: torch.dtype, right: torch.dtype) -> None:
    a, b = operands(33, 100, 17, left, right)
    exact = fp64(a, b)
    found = scaled_mm(a, b, out_dtype=torch.float32)
    assert sqnr(exact, found) > 140
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(scaled_mm(a, b, out_dtype=torch.float32), found)
    # The best that rounding to 8 and 11 bits allows.
    for dtype in (torch.bfloat16, torch.float16):
        out = scaled_mm(a, b, out_dtype=dtype)
        assert sqnr(exact, out) > sqnr(exact, exact.to(dtype)) - 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_does_not_depend_on_how_it_is_split(dtype: torch.dtype) -> None:
    for m, k, n in ((16, 1000, 33), (7, 1024, 4), (4, 4096, 6), (96, 384, 32)):
        a, b = operands(m, k, n)
        whole = scaled_mm(a, b, out_dtype=dtype)
        parts = [scaled_mm(a, part, out_dtype=dtype) for part in b.chunk(3, dim=1)]
        assert same_bits(whole, torch.cat(parts, dim=1))
        parts = [scaled_mm(part, b, out_dtype=dtype) for part in a.chunk(2)]
        assert same_bits(whole, torch.cat(parts))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_the_products_of_a_layer_are_exact_up_to_the_last_rounding(recipe: str) -> None:
    linear = torch.nn.Linear(96, 80, bias=False, dtype=torch.bfloat16)
    layer = Float8Linear.from_float(linear, Float8LinearConfig.from_recipe_name(recipe))
    x = torch.randn(64, 96, dtype=torch.bfloat16, requires_grad=True)
    with record_gemms() as records:
        output = layer(x)
        output.backward(torch.randn_like(output))
    results = {"output": output, "grad_input": x.grad, "grad_weight": layer.weight.grad}
    for record in records:
        a, b = (x.scheme.dequantize(x.qdata, x.scales).double() for x in (record.a, record.b))
        exact, found = a @ b, results.pop(record.gemm)
        assert found is not None
        assert sqnr(exact, found) > sqnr(exact, exact.bfloat16()) - 0.1
        assert record.options[3] == (record.gemm != "output")  # the output has the same bits on TP
    assert not results


@pytest.mark.parametrize(
    ("onednn", "avx512", "avx512_bf16", "expected"),
    [
        (True, True, True, True),
        (False, True, True, False),  # ONEDNN_MAX_CPU_ISA
        (True, True, False, False),
        (False, False, False, False),
        (True, False, False, True),  # ARM
        (None, False, False, False),  # a build without oneDNN
    ],
)
def test_the_dtype_is_one_that_the_cpu_multiplies_fast(
    onednn: bool | None,
    avx512: bool,
    avx512_bf16: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn is not None)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch_internals, "_has_avx512", lambda: avx512)
    monkeypatch.setattr(torch_internals, "_has_avx512_bf16", lambda: avx512_bf16)
    assert torch_internals.has_bf16_instructions() is expected
    monkeypatch.setattr(cpu, "_HAS_BF16", expected)
    found = [cpu.gemm_dtype(torch.bfloat16, any_order) for any_order in (False, True)]
    assert found == ([torch.bfloat16] * 2 if expected else [torch.float64, torch.float32])
    assert cpu.gemm_dtype(torch.float32, True) is torch.float64


def test_all_of_this_on_a_cpu_with_avx2_alone() -> None:
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    names = "exact_up_to or does_not_depend or non_finite or round_once or not_finite"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        names,
    ]
    done = run(command, timeout=120, env=os.environ | limits, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stdout


def test_empty_operands_and_scales_that_are_not_finite() -> None:
    for m, k, n in ((0, 16, 8), (4, 0, 8), (4, 16, 0)):
        out = scaled_mm(*operands(m, k, n), out_dtype=torch.bfloat16)
        assert torch.equal(out, torch.zeros(m, n, dtype=torch.bfloat16))
    for bad, dtype in product((math.nan, math.inf), (torch.float32, torch.bfloat16)):
        x = torch.randn(8, 16)
        x[0, 0] = bad
        a, (_, b) = cast_to_float8(x, CastConfig()), operands(8, 16, 4)
        assert scaled_mm(a, b, out_dtype=dtype).isnan().all()


def test_strict_alignment_refuses_on_cpu_what_a_gpu_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = operands(3, 20, 24)
    free = scaled_mm(a, b, out_dtype=torch.float32)
    monkeypatch.setenv("FP8_DIST_STRICT_ALIGNMENT", "1")
    message = raised(ValueError, lambda: scaled_mm(a, b, out_dtype=torch.float32))
    assert "the inner dim 20 and the last dim 24 must be multiples of 16 on this device" in message
    padded = scaled_mm(a, b, out_dtype=torch.float32, pad_inner_dim=True)
    assert padded.is_contiguous()
    assert same_bits(padded, free)
    aligned = operands(3, 32, 48)  # the first dim is free
    assert scaled_mm(*aligned, out_dtype=torch.float32).shape == (3, 48)
    monkeypatch.setenv("FP8_DIST_STRICT_ALIGNMENT", "maybe")
    for call in (lambda: scaled_mm(a, b, out_dtype=torch.float32), lambda: Float8Linear(16, 16)):
        assert "FP8_DIST_STRICT_ALIGNMENT='maybe'" in raised(ValueError, call)


def test_row_scales_that_are_no_powers_of_two_round_once() -> None:
    a, b = (cast_to_float8(torch.randn(64, 512), ROWS, dim=-1) for _ in range(2))
    found = scaled_mm(a, b.t(), out_dtype=torch.bfloat16)
    assert same_bits(found, fp64(a, b.t()).to(torch.bfloat16))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_beside_a_non_finite_one_keep_their_bits(bad: float) -> None:
    # An accumulator of 24 bits rounds these sums, and one of 53 does not: they show which one ran.
    x, w = torch.full((8, 64), 2.0**-9), torch.full((16, 64), 2.0**-9)
    x[:, 0], x[:, -1], w[:, 0], w[:, -1] = 448, -448, 448, 448
    products, options = [], {"dim": -1, "round_scales_to_power_of_2": True}
    for value in (0.0, bad):
        x[3, 5] = value
        a, b = (cast_to_float8(each, ROWS, **options) for each in (x, w))
        products.append(scaled_mm(a, b.t(), out_dtype=torch.bfloat16))
    assert products[1][3].isnan().all()
    assert same_bits(*(product[torch.arange(8) != 3] for product in products))


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, tuple[int, ...]]]:
    """Replace a GPU's GEMM; list if each call accumulates fast, and the shape of a's scales."""
    calls: list[tuple[bool, tuple[int, ...]]] = []

    def multiply(a, b, scale_a, scale_b, *, out_dtype, use_fast_accum):  # type: ignore[no-untyped-def]
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert not [size for size in (a.shape[1], b.shape[1]) if size % 16]
        calls.append((use_fast_accum, tuple(scale_a.shape)))
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    monkeypatch.setattr(gemm, "has_gemm", lambda *_: True)
    monkeypatch.setattr(gemm, "native_scaled_mm", multiply)
    return calls


def test_the_native_path(native: list[tuple[bool, tuple[int, ...]]]) -> None:
    for fast in (False, True):
        a, b = operands(33, 20, 17)
        out = scaled_mm(a, b, out_dtype=torch.float32, pad_inner_dim=True, use_fast_accum=fast)
        assert sqnr(fp64(a, b), out) > 120
    assert native == [(False, ()), (True, ())]
    scaled_mm(a, b, out_dtype=torch.float32, emulate=True)
    assert len(native) == 2


def test_the_rowwise_kernel_takes_what_all_devices_take(
    native: list[tuple[bool, tuple[int, ...]]],
) -> None:
    x, w = torch.randn(32, 64), torch.randn(16, 64)
    for right in (torch.float8_e4m3fn, torch.float8_e5m2):
        config = CastConfig(target_dtype=right, scaling_granularity=ScalingGranularity.AXISWISE)
        a, b = cast_to_float8(x, ROWS, dim=-1), cast_to_float8(w, config, dim=-1).t()
        found = scaled_mm(a, b, out_dtype=torch.bfloat16)
        assert sqnr(fp64(a, b), found) > 50
    assert [scales for _, scales in native] == [(32, 1), ()]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("cuda", "fast", "warns"),
    [("12.8", False, True), ("12.8", True, False), ("12.9", False, False), ("13.0", False, False)],
)
def test_a_slow_rowwise_kernel_is_told(
    cuda: str, fast: bool, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    a, b = (cast_to_float8(torch.randn(16, 32), ROWS, dim=-1) for _ in range(2))
    with all_warnings() as texts:
        for _ in range(2):
            scaled_mm(a, b.t(), out_dtype=torch.bfloat16, use_fast_accum=fast)
    assert [f"CUDA {cuda}" in text for text in texts] == [True] * warns
