"""Float8Tensor: copies, its repr and its refusals. Its op table: test_row_scales."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from reference import raised, reloaded, same_cast

from fp8_dist import CastConfig, Float8Tensor, cast_to_float8
from fp8_dist.fsdp import Float8AllGatherWeight

E5M2 = CastConfig(target_dtype=torch.float8_e5m2)


def float8(*shape: int, config: CastConfig | None = None) -> Float8Tensor:
    return cast_to_float8(torch.randn(shape), config or CastConfig())


def test_copies_and_new_tensors() -> None:
    x, y = float8(3, 4), float8(3, 4)
    x.copy_(y)
    assert same_cast(x, y)
    for like in (torch.zeros_like(x), torch.empty_like(x), x.new_zeros(2, dtype=torch.float32)):
        assert type(like) is torch.Tensor
        assert like.dtype is torch.float32
    assert torch.equal(x.new_zeros(2).dequantize(), torch.zeros(2))
    assert isinstance(x.new_empty(0, 4), Float8Tensor)
    converted = x.to(torch.bfloat16)
    assert converted.dtype is torch.bfloat16
    assert same_cast(converted, x)
    assert isinstance(torch.nn.Parameter(x), Float8Tensor)
    assert same_cast(reloaded(x), x)
    clone = x.clone()
    clone.copy_(float8(3, 4))
    assert same_cast(x, y)  # a clone has a scale of its own


def test_repr_is_one_line_without_values_that_are_elsewhere() -> None:
    x = Float8Tensor(torch.ones(2, 3).to(torch.float8_e4m3fn), torch.tensor(0.25), torch.bfloat16)
    line = "Float8Tensor(shape=(2, 3), qdata=e4m3fn, scale={}, orig_dtype=bfloat16, device={})"
    assert repr(x) == line.format(0.25, "cpu")
    assert repr(x.to("meta")) == line.format("?", "meta")
    weight = Float8AllGatherWeight(torch.ones(2), "weight")
    assert repr(weight) == "Float8AllGatherWeight(tensor([1., 1.]), dtype=torch.float32)"


def test_refusals_name_what_was_asked_and_what_to_do() -> None:
    x, y = float8(4, 4), float8(4, 4)
    refused: list[tuple[type[Exception], Callable[[], object], str]] = [
        (NotImplementedError, lambda: x + 1, "aten.add.Tensor is not supported on a Float8Tensor; call .dequantize() and"),
        (ValueError, lambda: torch.cat([x, y]), "cast with different scales can't be put together; dequantize() them"),
        (NotImplementedError, lambda: torch.cat([x, torch.randn(4, 4)]), "aten.cat.default of a Float8Tensor and a Tensor of torch.float32: cast_to_float8 the second, or dequantize()"),
        (ValueError, lambda: torch.cat([x, float8(4, 4, config=E5M2)]), "torch.cat of torch.float8_e4m3fn with one scale per tensor and torch.float8_e5m2 with one"),
        (NotImplementedError, lambda: F.pad(x, (1, 1), value=1.0), "only 0 has the same float8 code under every scale"),
        (NotImplementedError, lambda: x.to(torch.int32), "a Float8Tensor cannot become torch.int32; call .dequantize() and convert the result"),
        (NotImplementedError, lambda: x @ torch.randn(4, 4), "aten.mm.default of a Float8Tensor and a Tensor of torch.float32: cast_to_float8 the second, or dequantize() the first"),
        (NotImplementedError, lambda: torch.randn(4, 4).copy_(x), "aten.copy_.default of a Float8Tensor and a Tensor of torch.float32: cast_to_float8 the second"),
        (TypeError, lambda: cast_to_float8(x, CastConfig()), "cast_to_float8: the tensor is float8 already; use it as it is"),
        (TypeError, lambda: cast_to_float8(torch.arange(3), CastConfig()), "cast_to_float8: expected a floating-point tensor, got torch.int64"),
        (ValueError, lambda: cast_to_float8(torch.randn(3), CastConfig(), dim=0), "dim=0 is the reduced dim of an axiswise cast, but the granularity is ScalingGranularity.TENSORWISE; drop dim"),
        (TypeError, lambda: Float8Tensor(torch.ones(2), torch.ones(()), torch.float32), "Float8Tensor: qdata must have a float8 dtype, got torch.float32"),
    ]  # fmt: skip
    for kind, call, message in refused:
        assert message in raised(kind, call)
