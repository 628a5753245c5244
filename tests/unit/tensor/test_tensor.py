"""Float8Tensor: its repr, its op table against the dequantized twin, and its refusals."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from reference import raised, same_bits, same_cast, sqnr

from fp8_dist import CastConfig, Float8Tensor, cast_to_float8
from fp8_dist.fsdp import Float8AllGatherWeight

E5M2 = CastConfig(target_dtype=torch.float8_e5m2)


def float8(*shape: int, config: CastConfig | None = None) -> Float8Tensor:
    return cast_to_float8(torch.randn(shape), config or CastConfig())


# Ops that move elements: on the float8 tensor, and on the dequantized one.
MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(8, 6),
    "reshape of a transpose": lambda x: x.t().reshape(-1),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (3, 4)),
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "expand": lambda x: x.unsqueeze(0).expand(2, 4, 12),
    "slice": lambda x: x[1:3, ::2],
    "select": lambda x: x[2],
    "narrow": lambda x: x.narrow(1, 2, 5),
    "split": lambda x: x.split(3)[1],
    "split_with_sizes": lambda x: x.split([1, 3])[1],
    "chunk": lambda x: x.chunk(3)[0],
    "unbind": lambda x: x.unbind(1)[3],
    "cat": lambda x: torch.cat([x[:2], x, x[1:]]),
    "cat on dim 1": lambda x: torch.cat(x.chunk(2, 1), dim=1),
    "pad": lambda x: F.pad(x, (0, 3, 1, 0)),
    "as_strided": lambda x: x.as_strided((2, 3), (3, 1), 4),
    "clone": lambda x: x.clone(),
    "clone of a transpose": lambda x: x.t().clone(memory_format=torch.contiguous_format),
    "contiguous": lambda x: x.t().contiguous(),
    "detach": lambda x: x.detach(),
    "alias": lambda x: torch.ops.aten.alias(x),
    "view_as": lambda x: x.view_as(x),
    "deepcopy": lambda x: copy.deepcopy(x),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("config", [CastConfig(), E5M2], ids=["e4m3", "e5m2"])
def test_moves_elements_like_the_dequantized_twin(name: str, config: CastConfig) -> None:
    x = float8(4, 12, config=config)
    moved, expected = MOVES[name](x), MOVES[name](x.dequantize())
    assert isinstance(moved, Float8Tensor)
    assert same_bits(moved.scale, x.scale)
    assert moved.orig_dtype is x.orig_dtype
    assert moved.stride() == moved.qdata.stride()
    assert torch.equal(moved.dequantize(), expected)


# Ops that multiply: the result is close to the twin's (same products, other rounding).
PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mm": lambda x, w: x @ w.t(),
    "linear": lambda x, w: F.linear(x, w),
    "linear with bias": lambda x, w: F.linear(x, w, torch.arange(8.0)),
    "linear on 3 dims": lambda x, w: F.linear(x.view(2, 3, 16), w),
    "addmm": lambda x, w: torch.addmm(torch.arange(8.0), x, w.t(), beta=0.5, alpha=2.0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_multiplies_like_the_dequantized_twin(name: str) -> None:
    x, w = float8(6, 16), float8(8, 16, config=E5M2)
    product = PRODUCTS[name](x, w)
    assert type(product) is torch.Tensor
    assert sqnr(PRODUCTS[name](x.dequantize(), w.dequantize()), product) > 120


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


def test_survives_a_parameter_a_pickle_and_a_checkpoint() -> None:
    x = float8(3, 4)
    assert isinstance(torch.nn.Parameter(x), Float8Tensor)
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert same_cast(torch.load(file, weights_only=True), x)


def test_repr() -> None:
    x = Float8Tensor(torch.ones(2, 3).to(torch.float8_e4m3fn), torch.tensor(0.25), torch.bfloat16)
    assert_expected_inline(
        repr(x),
        """Float8Tensor(shape=(2, 3), qdata=e4m3fn, scale=0.25, orig_dtype=bfloat16, device=cpu)""",
    )
    assert_expected_inline(
        repr(x.to("meta")),
        """Float8Tensor(shape=(2, 3), qdata=e4m3fn, scale=?, orig_dtype=bfloat16, device=meta)""",
    )


def test_refusals_name_what_was_asked_and_what_to_do() -> None:
    x, y = float8(4, 4), float8(4, 4)
    assert_expected_inline(
        raised(NotImplementedError, lambda: x + 1),
        """aten.add.Tensor is not supported on a Float8Tensor; call .dequantize() and use the high-precision tensor""",
    )
    assert_expected_inline(
        raised(ValueError, lambda: torch.cat([x, y])),
        """float8 tensors that were cast with different scales can't be put together; dequantize() them, or cast them together""",
    )
    assert_expected_inline(
        raised(TypeError, lambda: torch.cat([x, torch.randn(4, 4)])),
        """torch.cat of a Float8Tensor and a Tensor: dequantize() the first or cast_to_float8 the second""",
    )
    assert_expected_inline(
        raised(ValueError, lambda: torch.cat([x, float8(4, 4, config=E5M2)])),
        """torch.cat of float8 tensors of torch.float8_e4m3fn and torch.float8_e5m2""",
    )
    assert_expected_inline(
        raised(NotImplementedError, lambda: F.pad(x, (1, 1), value=1.0)),
        """padding a Float8Tensor with 1.0: only 0 has the same float8 code under every scale; call .dequantize() first""",
    )
    assert_expected_inline(
        raised(NotImplementedError, lambda: x.to(torch.int32)),
        """a Float8Tensor cannot become torch.int32; call .dequantize() and convert the result""",
    )
    assert_expected_inline(
        raised(NotImplementedError, lambda: x @ torch.randn(4, 4)),
        """aten.mm.default of a Float8Tensor and a Tensor of torch.float32: cast_to_float8 the second, or dequantize() the first. (A weight that FSDP2 gathers in float8 can be used by Float8Linear layers alone.)""",
    )
    assert_expected_inline(
        raised(NotImplementedError, lambda: torch.randn(4, 4).copy_(x)),
        """aten.copy_.default between a Tensor and a Float8Tensor: dequantize() or cast_to_float8 first, so that both are of one kind""",
    )
    assert_expected_inline(
        raised(TypeError, lambda: cast_to_float8(x, CastConfig())),
        """cast_to_float8: the tensor is float8 already""",
    )
    assert_expected_inline(
        raised(TypeError, lambda: cast_to_float8(torch.arange(3), CastConfig())),
        """cast_to_float8: expected a floating-point tensor, got torch.int64""",
    )
    assert_expected_inline(
        raised(ValueError, lambda: cast_to_float8(torch.randn(3), CastConfig(), dim=0)),
        """cast_to_float8: dim=0 is the reduced dim of an axiswise cast, but the granularity is TENSORWISE; drop dim""",
    )
    assert_expected_inline(
        raised(TypeError, lambda: Float8Tensor(torch.ones(2), torch.ones(()), torch.float32)),
        """Float8Tensor: qdata must have a float8 dtype, got torch.float32""",
    )


def test_repr_of_a_weight() -> None:
    assert_expected_inline(
        repr(Float8AllGatherWeight(torch.ones(2))), """Float8AllGatherWeight(tensor([1., 1.]))"""
    )
