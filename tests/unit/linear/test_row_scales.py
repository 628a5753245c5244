"""Float8Tensor with one scale or one per row, column or any other line: casts, and the op table."""

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from recipe_algebra import magnitude, rounded
from reference import raised, same_bits, sqnr

from fp8_dist import CastConfig, Float8Tensor, ScalingGranularity, cast_to_float8

AXISWISE = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
E4M3, E5M2 = CastConfig(), CastConfig(target_dtype=torch.float8_e5m2)  # one scale per tensor
SHAPES = [(6,), (6, 8), (4, 6, 8), (2, 4, 6, 8), (1, 8), (6, 1), (1, 1), (4, 1, 8), (4, 6, 1)]
EMPTY = [(0, 8), (0, 6, 8)]
# Shapes of more elements than a block.
LARGE = [(300, 257), (3, 200, 130), (1, 70000), (70000, 1), (1, 1, 70000)]


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    """Random numbers of many magnitudes along every dim."""
    return torch.randn(shape) * torch.randn(shape).mul(3).exp()


def lines(*shape: int, dim: int = -1) -> Float8Tensor:
    cast = cast_to_float8(numbers(shape), AXISWISE, dim=dim)
    assert isinstance(cast, Float8Tensor)
    return cast


@pytest.mark.parametrize("shape", SHAPES + LARGE)
def test_casts_equal_the_reference(shape: tuple[int, ...]) -> None:
    x = numbers(shape)
    for dim in range(-len(shape), len(shape)):
        power_of_2 = dim % 2 == 0  # each dim has two indices, one for each dtype
        target = torch.float8_e4m3fn if dim < 0 else torch.float8_e5m2
        config = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=target)
        cast = cast_to_float8(x, config, dim=dim, round_scales_to_power_of_2=power_of_2)
        expected = rounded(x, target, magnitude(x, dim), power_of_2)
        assert torch.equal(cast.qdata.double() * cast.scale.double(), expected)
        assert cast.scale.shape == magnitude(x, dim).shape


# Ops that move elements: on the float8 tensor, and on the dequantized one.
MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "deepcopy": lambda x: copy.deepcopy(x),
    "to a copy": lambda x: x.to("cpu", copy=True),
    "to bf16": lambda x: x.to(torch.bfloat16),
    "as_strided to the same": lambda x: x.as_strided(x.shape, x.stride()),
    "alias": lambda x: torch.ops.aten.alias(x),
    "view as it is": lambda x: x.view(x.shape),  # DTensor.from_local makes such a view
    "transpose": lambda x: x.transpose(0, -1),
    "clone of a transpose": lambda x: x.mT.clone(memory_format=torch.contiguous_format),
    "permute": lambda x: x.permute(*reversed(range(x.ndim))),
    "contiguous": lambda x: x.transpose(0, -1).contiguous(),
    "unsqueeze first": lambda x: x.unsqueeze(0),
    "unsqueeze last": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "expand": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "slice first": lambda x: x[1:3],
    "slice last": lambda x: x[..., ::2],
    "slice of nothing": lambda x: x[2:2],
    "select first": lambda x: x[0],
    "select in the middle": lambda x: x[2],
    "select last": lambda x: x[..., 0],
    "narrow": lambda x: x.narrow(-1, 0, 1),
    "split": lambda x: x.split(1)[0],
    "split last": lambda x: x.split(3, -1)[-1],
    "split_with_sizes": lambda x: x.split([1, x.shape[0] - 1])[1],
    "chunk": lambda x: x.chunk(2)[-1],
    "tensor_split": lambda x: x.tensor_split(3, -1)[1],
    "unbind": lambda x: x.unbind()[0],
    "unbind last": lambda x: x.unbind(-1)[0],
    "cat first": lambda x: torch.cat([x, x, x[1:]]),
    "cat last": lambda x: torch.cat(x.split(3, -1), -1),
    "cat with nothing": lambda x: torch.cat([x[:0], x]),
    "pad first": lambda x: F.pad(x, (0, 0) * (x.ndim - 1) + (1, 2)),
    "pad both": lambda x: F.pad(x, (0, 3, 1, 0)),
    "pad last": lambda x: F.pad(x, (1, 2)),
    "crop": lambda x: F.pad(x, (-1, 0)),
    "several": lambda x: x.transpose(0, -1)[1:3].unsqueeze(0).clone(),
    "flatten leading dims": lambda x: x.flatten(0, -2),
    "unflatten first": lambda x: x.unflatten(0, (2, -1)),
    "unflatten last": lambda x: x.unflatten(-1, (2, -1)),
    "flatten": lambda x: x.flatten(),
    "as_strided": lambda x: x.as_strided((2,), (1,), 1),
    "flip": lambda x: x.flip(0),
    "add": lambda x: x + 1,
}


def moves(x: Float8Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> bool | None:
    """Whether an op moves the elements like those of the dequantized twin; None: it is refused."""
    expected = move(x.dequantize())
    try:
        moved = move(x)
    except NotImplementedError as error:
        text = str(error)
        return None if text.startswith("aten.") and "dequantize()" in text else False
    assert isinstance(moved, Float8Tensor)
    assert moved.stride() == moved.qdata.stride()
    assert moved.orig_dtype is expected.dtype
    if x.scale.ndim == 0:
        assert same_bits(moved.scale, x.scale)
    return torch.equal(moved.dequantize(), expected)


@pytest.mark.parametrize("shape", SHAPES + EMPTY)
def test_moves_elements_like_the_dequantized_twin(shape: tuple[int, ...]) -> None:
    rows = [lines(*shape, dim=dim) for dim in range(len(shape))]
    casts = [*rows, *(cast_to_float8(numbers(shape), config) for config in (E4M3, E5M2))]
    for (name, move), x in product(MOVES.items(), casts):
        try:
            move(x.dequantize())
        except (RuntimeError, IndexError):
            continue  # not for this shape
        assert moves(x, move) in (True, None), (name, x)


def test_which_ops_are_refused() -> None:
    cases = [(shape, dim) for shape in ((6, 8), (4, 6, 8)) for dim in range(len(shape))]
    whole = cast_to_float8(numbers((4, 6, 8)), E4M3)
    assert [name for name, move in MOVES.items() if moves(whole, move) is None] == ["flip", "add"]
    assert moves(whole, lambda x: x.transpose(0, -1).reshape(-1))
    refused = {
        name: [case for case in cases if moves(lines(*case[0], dim=case[1]), move) is None]
        for name, move in MOVES.items()
    }
    assert {name: where for name, where in refused.items() if where} == {
        "flatten leading dims": [((4, 6, 8), 0), ((4, 6, 8), 1)],
        "unflatten first": [((4, 6, 8), 0), ((4, 6, 8), 1)],
        **dict.fromkeys(("unflatten last", "flatten", "as_strided", "flip", "add"), cases),
    }


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mm": lambda x, w: x @ w.t(),
    "linear": lambda x, w: F.linear(x, w),
    "linear with bias": lambda x, w: F.linear(x, w, torch.arange(8.0)),
    "linear on 3 dims": lambda x, w: F.linear(x.view(2, 3, 16), w),
    "addmm": lambda x, w: torch.addmm(torch.arange(8.0), x, w.t(), beta=0.5, alpha=2.0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_multiplies_like_the_dequantized_twin(name: str) -> None:
    for x in (lines(6, 16), cast_to_float8(torch.randn(6, 16), E4M3)):
        for w in (lines(8, 16), lines(16, 8, dim=0).t(), cast_to_float8(torch.randn(8, 16), E5M2)):
            product = PRODUCTS[name](x, w)
            assert type(product) is torch.Tensor
            assert sqnr(PRODUCTS[name](x.dequantize(), w.dequantize()), product) > 120


def test_refused_casts_and_products() -> None:
    x, along = (
        torch.randn(2, 3),
        "runs along the dim that is summed over; cast along it (dim={}) in",
    )
    for call, text in (
        (lambda: lines(6, 16) @ lines(16, 8), along.format(0)),
        (lambda: lines(6, 16, dim=0) @ lines(16, 8, dim=0), along.format(1)),
        (lambda: cast_to_float8(x, AXISWISE), "an AXISWISE cast needs dim, the reduced dim (-1: a"),
        (lambda: cast_to_float8(x, AXISWISE, dim=2), "dim=2, but the tensor has 2 dims"),
        (lambda: cast_to_float8(x, AXISWISE, dim=-3), "dim=-3, but the tensor has 2 dims"),
        (lambda: cast_to_float8(x[0, 0], AXISWISE, dim=-1), "dim=-1, but the tensor has 0 dims"),
    ):
        assert text in raised(ValueError, call)


@pytest.mark.parametrize("dim", [None, 0, 1, 2])
def test_the_gradient_passes_through_cast_and_dequantize(dim: int | None) -> None:
    x, weights = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 4, 5)
    config = CastConfig() if dim is None else AXISWISE
    (cast_to_float8(x, config, dim=dim).dequantize() * weights).sum().backward()
    assert torch.equal(x.grad, weights)
