"""On a GPU: the device's float8 GEMMs, compared with their emulation in fp32."""

import itertools
from dataclasses import replace

import pytest
import torch
from gemm_records import GemmRecord, record_gemms, scaled_mm
from recipe_algebra import GEMMS, config_of
from reference import sqnr

from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    cast_to_float8,
)
from fp8_dist.tensor import Float8Tensor

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
RECIPES = [recipe.value for recipe in Float8LinearRecipeName]
OUT_DTYPES = [torch.bfloat16, torch.float32, torch.float16]
# Rounding to bf16 alone leaves about 55 dB; fast accumulation keeps 14 bits of a sum.
LEAST_DB = 45


def gemms_of_a_step(recipe: str, m: int, k: int, n: int) -> list[GemmRecord]:
    """Records of the float8 GEMMs of a forward and backward."""
    config = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)
    layer = Float8Linear(k, n, bias=False, device=DEVICE, dtype=torch.bfloat16, config=config)
    x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    with record_gemms() as records:
        layer(x).backward(torch.randn(m, n, device=DEVICE, dtype=torch.bfloat16))
    return records


def check(a: Float8Tensor, b: Float8Tensor, out_dtype: torch.dtype, fast: bool) -> None:
    options = {"out_dtype": out_dtype, "pad_inner_dim": True}
    native = scaled_mm(a, b, use_fast_accum=fast, **options)
    emulated = scaled_mm(a, b, emulate=True, **options)
    assert native.dtype is out_dtype
    assert native.shape == emulated.shape == (a.shape[0], b.shape[1])
    assert native.is_contiguous()
    assert sqnr(emulated, native) > LEAST_DB, (a.shape, b.shape, a.scale.shape, b.scale.shape)


@pytest.mark.parametrize("shape", [(64, 128, 96), (33, 128, 96), (1, 64, 48), (7, 20, 33)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gemms_of_every_recipe(recipe: str, shape: tuple[int, int, int]) -> None:
    records = gemms_of_a_step(recipe, *shape)
    assert len(records) == sum(map(config_of(recipe).gemm_enabled, GEMMS))
    for record, dtype, fast in itertools.product(records, OUT_DTYPES, (False, True)):
        check(record.a, record.b, dtype, fast)


@pytest.mark.parametrize("recipe", RECIPES)
def test_empty_gemms(recipe: str) -> None:
    for record in [*gemms_of_a_step(recipe, 0, 64, 48), *gemms_of_a_step(recipe, 64, 64, 0)]:
        assert not scaled_mm(record.a, record.b, out_dtype=torch.bfloat16).any()


def laid_out(x: Float8Tensor, layout: str) -> Float8Tensor:
    """The same matrix in row-major or column-major layout, or with gaps between rows."""
    data = x.qdata.view(torch.uint8)
    if layout == "columns":
        data = data.t().contiguous().t()
    elif layout == "gaps":
        wide = data.new_zeros(data.shape[0], data.shape[1] + 16)
        data = wide[:, : data.shape[1]].copy_(data)
    else:
        data = data.contiguous()
    return x.rewrap(qdata=data.view(x.qdata.dtype))


@pytest.mark.parametrize("rows", [False, True])
def test_operands_of_any_layout(rows: bool) -> None:
    kind = ScalingGranularity.AXISWISE if rows else ScalingGranularity.TENSORWISE
    config, dim = CastConfig(scaling_granularity=kind), -1 if rows else None
    a = cast_to_float8(torch.randn(33, 64, device=DEVICE), config, dim=dim)
    b = cast_to_float8(torch.randn(48, 64, device=DEVICE), config, dim=dim).t()
    expected = scaled_mm(a, b, out_dtype=torch.bfloat16)
    check(a, b, torch.bfloat16, False)
    for layouts in itertools.product(("rows", "columns", "gaps"), repeat=2):
        laid_out_a, laid_out_b = map(laid_out, (a, b), layouts)
        assert torch.equal(scaled_mm(laid_out_a, laid_out_b, out_dtype=torch.bfloat16), expected), (
            layouts
        )


@pytest.mark.parametrize("shape", [(512, 4096, 1024), (512, 14336, 256)])
def test_long_sums(shape: tuple[int, int, int]) -> None:
    for record in gemms_of_a_step("tensorwise", *shape):
        check(record.a, record.b, torch.bfloat16, False)
