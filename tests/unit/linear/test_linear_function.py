"""The linear function: any shape, dtype and gradient, with and without the dispatcher."""

import math
from itertools import product

import pytest
import torch
from reference import Watching, same_bits

from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingType,
    sync_float8_amax_and_scale_history,
)
from fp8_dist.config import CastSpec, CopySpec
from fp8_dist.linear.shared_input import last_cast, note_cast
from fp8_dist.tensor import Quantized

SHAPES = [(48,), (1, 48), (5, 48), (2, 3, 48), (0, 48), (2, 0, 48), (2, 2, 3, 48), (400, 48)]


def results(layer: Float8Linear, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Output and gradients of a step."""
    layer.float8_weight.cache.drop()
    layer.zero_grad()
    x.grad = None
    output = layer(x)
    if output.requires_grad:
        output.backward(gradient(output))
    found = [output.detach(), x.grad, *(p.grad for p in layer.parameters())]
    return [None if t is None else t.clone() for t in found]


def gradient(output: torch.Tensor) -> torch.Tensor:
    """Another value in each row; expanded."""
    rows = torch.linspace(-3, 2, output.numel() // output.shape[-1]).to(output)
    return rows.reshape(*output.shape[:-1], 1).expand(output.shape)


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("i", range(len(SHAPES)))
def test_direct_calls_give_the_bits_of_the_operators(i: int) -> None:
    e5m2 = CastConfig(target_dtype=torch.float8_e5m2)
    shape, dtypes = SHAPES[i], (DTYPES[i % 4], DTYPES[(i + 1) % 4])
    for dtype, bias, x_learns, weight_learns in product(dtypes, *[(False, True)] * 3):
        config = Float8LinearConfig(cast_config_weight=e5m2 if bias else CastConfig())
        layer = Float8Linear(48, 33, bias=bias, dtype=dtype, config=config)
        layer.weight.requires_grad_(weight_learns)
        x = (torch.randn(shape) * 4).to(dtype)
        if x_learns and not bias:
            x.view(-1)[:1] = math.inf
        x.requires_grad_(x_learns)
        found = results(layer, x)
        with Watching() as watching:
            expected = results(layer, x)
        gemms = 1 + x_learns + weight_learns
        assert watching.seen.count("fp8_dist.scaled_mm.default") == gemms
        for direct, dispatched in zip(found, expected, strict=True):
            assert (direct is None) == (dispatched is None)
            assert direct is None or dispatched is None or same_bits(direct, dispatched)


@pytest.mark.parametrize("scaling_type", [ScalingType.DYNAMIC, ScalingType.DELAYED])
def test_what_has_outgrown_a_known_scale_saturates(scaling_type: ScalingType) -> None:
    cast = CastConfig(scaling_type=scaling_type, target_dtype=torch.float8_e5m2)
    config = Float8LinearConfig(cast_config_weight=cast, cache_float8_shards=False)
    layer, x = Float8Linear(16, 16, config=config), torch.randn(4, 16)
    layer(x).sum().backward()
    if scaling_type is ScalingType.DELAYED:
        sync_float8_amax_and_scale_history(layer)
        with torch.no_grad():
            layer.weight.mul_(50)
    else:
        layer.weight.data.mul_(50)  # unnoticed
    assert layer(x).isfinite().all()


def test_the_last_cast_is_read_at_once() -> None:
    ones, sevens = torch.ones(4), torch.full((4,), 7.0)
    copy = CopySpec(CastSpec(torch.float8_e4m3fn))
    casts = [{copy: Quantized(x.to(torch.float8_e4m3fn), torch.ones(()))} for x in (ones, sevens)]

    class Interrupted:
        """While it is compared another thread takes over."""

        def __eq__(self, _: object) -> bool:
            note_cast(sevens, "key", casts[1])
            return True

        __hash__ = None  # type: ignore[assignment]

    note_cast(ones, Interrupted(), casts[0])
    found = last_cast(ones, Interrupted())
    assert found is not None
    assert found[copy].qdata is casts[0][copy].qdata
