"""Float8Tensor with block scales: its parts, their concatenation, and refused operators."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import (
    raised,
    reference_blocks,
    reloaded,
    same_bits,
    same_cast,
    scale_of_elements,
    sqnr,
)

from fp8_dist import CastConfig, Float8Tensor, ScalingGranularity, cast_to_float8
from fp8_dist.scaling import Blocks

E4M3 = torch.float8_e4m3fn


def cast(x: torch.Tensor, rows: int, columns: int, rule: Any = None) -> Float8Tensor:
    config = CastConfig(
        scaling_granularity=ScalingGranularity.BLOCKWISE,
        block_size=(rows, columns),
        scale_rule=rule,
    )
    found = cast_to_float8(x, config)
    assert isinstance(found, Float8Tensor)
    return found


def values(*shape: int) -> torch.Tensor:
    """Of many magnitudes, so that no two blocks have the same scale by chance alone."""
    return torch.randn(shape) * (3 * torch.randn(shape)).exp()


def row_blocks() -> Float8Tensor:
    return cast(values(10, 14), 1, 4)


def square_blocks() -> Float8Tensor:
    return cast(values(10, 14), 4, 4)


def deep_blocks() -> Float8Tensor:
    return cast(values(2, 3, 14), 1, 4)


KINDS = {"rows": row_blocks, "squares": square_blocks, "3 dims": deep_blocks}
kinds = pytest.mark.parametrize("kind", KINDS)


def check(found: Float8Tensor, expected: torch.Tensor) -> None:
    """Check a tensor's values, also with its scales read as the reference reads them."""
    assert same_bits(found.dequantize(), expected.contiguous())
    by_scales = found.qdata.double() * scale_of_elements(found)
    assert same_bits(found.dequantize(), by_scales.to(found.dtype))


@pytest.mark.parametrize(
    ("dtype", "rule"), [(torch.float32, None), (torch.bfloat16, "ceil"), (torch.float16, "floor")]
)
def test_casts_of_any_number_of_dims(dtype: torch.dtype, rule: str | None) -> None:
    for shape in ((9,), (5, 9), (2, 3, 9), (2, 2, 3, 8), (0, 9), (5, 0)):
        x = torch.randn(shape).to(dtype)
        found = cast(x, 1, 4, rule)
        assert (found.shape, found.dtype, found.scale.dtype) == (shape, dtype, torch.uint8)
        check(found, found.dequantize())
        rows = x.reshape(x[..., :1].numel(), shape[-1]) if shape[-1] else x
        for row, mine in zip(rows, found.dequantize().view(rows.shape), strict=True):
            assert same_bits(cast(row[None], 1, 4, rule).dequantize()[0], mine)
        if x.numel():
            exponents, _ = reference_blocks(rows, E4M3, (1, 4, 0, 0), rule)
            assert same_bits(found.scale, exponents.view(found.scale.shape))


@pytest.mark.parametrize("kind", ["rows", "squares"])
def test_a_transposed_matrix(kind: str) -> None:
    x = KINDS[kind]()
    for transposed in (x.t(), x.mT, x.transpose(0, 1), x.permute(1, 0)):
        check(transposed, x.dequantize().t())  # type: ignore[arg-type]
        assert transposed.qdata.data_ptr() == x.qdata.data_ptr()
        assert same_cast(transposed.t(), x)
        assert transposed.t().scheme == x.scheme
    assert x.t().scheme == Blocks(E4M3, 4, 1 if kind == "rows" else 4)


PARTS: list[Callable[[torch.Tensor, int], Any]] = [
    lambda x, dim: x.chunk(2, dim),
    lambda x, dim: x.chunk(3, dim),
    lambda x, dim: x.split(3, dim),
    lambda x, dim: x.split([1, x.shape[dim] - 1], dim),
    lambda x, dim: [x.narrow(dim, i, 1) for i in range(x.shape[dim])],
    lambda x, dim: x.narrow(dim, 0, x.shape[dim]),
    lambda x, dim: x.narrow(dim, 1, 0),
]


@kinds
def test_parts(kind: str) -> None:
    """Include parts that begin inside of blocks, parts of parts, and of transposed tensors."""
    x = KINDS[kind]()
    wholes = [x, x[..., 3:], x[1:]] + ([x.t(), x[1:, 3:].t()] if x.ndim == 2 else [])
    for part, whole, dim in product(PARTS, wholes, range(-x.ndim, x.ndim)):
        found, expected = part(whole, dim), part(whole.dequantize(), dim)
        alone = isinstance(found, torch.Tensor)
        pairs = [(found, expected)] if alone else zip(found, expected, strict=True)
        for mine, theirs in pairs:
            check(mine, theirs)


@kinds
def test_parts_are_put_together_along_the_edges_of_blocks(kind: str) -> None:
    x = KINDS[kind]()
    for dim in range(x.ndim):
        whole = torch.cat(x.split(4, dim), dim)
        assert same_cast(whole, x)  # type: ignore[arg-type]
        assert whole.scheme == x.scheme
    if kind == "rows":
        assert same_cast(torch.cat([x[:3], x[3:]]), x)  # rows move whole
        assert same_cast(torch.cat([x[:3, 2:], x[3:, 2:]]), x[:, 2:])
        assert same_cast(torch.cat([x[:, 3:8], x[:, 8:]], -1), x[:, 3:])


def test_rows_move_whole_and_zeros_are_added_where_the_last_block_has_room() -> None:
    x, squares, deep = row_blocks(), square_blocks(), deep_blocks()
    moves: list[tuple[Any, Callable[[Any], Any]]] = [
        (x, lambda x: x.view(2, 5, 14)),
        (x, lambda x: x.unsqueeze(0)),
        (x, lambda x: x[3]),
        (deep, lambda x: x.view(6, 14)),
        (deep, lambda x: x.transpose(0, 1)),
        (deep, lambda x: x[1]),
        (deep, lambda x: x.unbind(1)[2]),
        (x, lambda x: F.pad(x, (0, 0, 1, 2))),
        (x, lambda x: F.pad(x, (0, 2))),
        (squares, lambda x: F.pad(x, (0, 2))),
        (squares, lambda x: F.pad(x, (0, 0, 0, 2))),
    ]
    for whole, move in moves:
        found = move(whole)
        assert isinstance(found, Float8Tensor)
        check(found, move(whole.dequantize()))


def test_what_no_scales_of_blocks_fit_is_refused() -> None:
    x, squares, deep = row_blocks(), square_blocks(), deep_blocks()
    calls: list[Callable[[], object]] = [
        lambda: x[:, ::2],
        lambda: x[:, 0],
        lambda: squares[0],
        lambda: squares.unbind(),
        lambda: squares.unsqueeze(0),
        lambda: squares.view(2, 5, 14),
        lambda: deep.transpose(0, 2),
        lambda: x.expand(2, 10, 14),
        lambda: F.pad(x, (1, 0)),
        lambda: F.pad(x, (0, 3)),
        lambda: F.pad(squares, (0, 0, 1, 0)),
        lambda: squares.as_strided((5, 14), (28, 1)),
        lambda: x.new_zeros(3),
        lambda: torch.cat([x[:, :3], x[:, 4:]], -1),  # ends inside of a block
        lambda: torch.cat([x[:, 2:4], x[:, 6:14]], -1),  # begins inside
        lambda: torch.cat([squares[:3], squares[4:]]),
        lambda: torch.cat([squares[2:4], squares[6:]]),
        lambda: torch.cat([squares[:, :2], squares[:, 8:]], 1),
        lambda: torch.cat([x[:3, 2:6], x[3:, 3:7]]),  # other blocks
        lambda: x[:3, 2:6].copy_(x[3:6, 3:7]),
    ]
    for call in calls:
        text = raised(NotImplementedError, call)
        assert "its result has no such scales; call .dequantize() first" in text
        assert "one scale per block of " in text
    assert "its rows would be others" in raised(NotImplementedError, lambda: x.flatten())
    text = raised(ValueError, lambda: torch.cat([x, squares]))
    assert "torch.cat of torch.float8_e4m3fn with one scale per block of" in text


@kinds
def test_copies(kind: str) -> None:
    x, y = KINDS[kind](), KINDS[kind]()
    copies = [copy.deepcopy(x), reloaded(x), x.clone(), x.detach()]
    for each in (*copies, y.copy_(x), torch.nn.Parameter(x).detach()):
        assert type(each) is Float8Tensor
        assert same_cast(each, x)
        assert each.scheme == x.scheme
    part = x[..., 3:9]
    assert part.clone().start == part.start == (0, 3)
    assert same_cast(part.clone(), part)
    converted = x.to(torch.bfloat16)
    assert converted.dtype is torch.bfloat16
    assert same_cast(converted, x)  # type: ignore[arg-type]
    assert torch.equal(x.new_zeros(*x.shape[:-1], 9).dequantize(), torch.zeros(*x.shape[:-1], 9))
    assert type(torch.zeros_like(x)) is torch.Tensor
    assert x.to("meta").dequantize().shape == x.shape
    assert f"scale=e8m0{[*x.scale.shape]}" in repr(x)


def test_products_of_matrices() -> None:
    x, w = row_blocks(), cast(values(6, 14), 4, 4)
    expected = x.dequantize().double() @ w.dequantize().double().t()
    assert sqnr(expected, x @ w.t()) > 120
    assert sqnr(expected, torch.mm(x, w.t())) > 120
    assert sqnr(expected + 1, torch.addmm(torch.ones(6), x, w.t())) > 120
    part = x[:, 3:9].dequantize().double() @ w[:, 3:9].dequantize().double().t()
    assert sqnr(part, x[:, 3:9] @ w[:, 3:9].t()) > 120


def test_errors() -> None:
    x, one = row_blocks(), cast_to_float8(torch.randn(14, 6), CastConfig())
    blocks, data = Blocks(E4M3, 1, 4), torch.zeros(2, 8).to(E4M3)
    exponents = torch.zeros(2, 2, dtype=torch.uint8)
    config = CastConfig(scaling_granularity=ScalingGranularity.BLOCKWISE, block_size=(4, 4))
    mixed = "their scaling schemes are not of one kind; cast both of them alike"
    cover = "do not cover qdata of shape (2, 8) with one scale per block of 1 x 4; they must be"
    refused: list[tuple[type[Exception], Callable[[], object], str]] = [
        (ValueError, lambda: x @ one, f"float8 GEMM of (10, 14) by (14, 6): one scale per block of 1 x 4 and per tensor: {mixed}"),
        (ValueError, lambda: one.t() @ x.t(), f"float8 GEMM of (6, 14) by (14, 10): one scale per tensor and per block of 4 x 1: {mixed}"),
        (TypeError, lambda: Float8Tensor(data, exponents.float(), torch.float32, blocks), "scales must be [torch.uint8] for one scale per block of 1 x 4, and orig_dtype"),
        (TypeError, lambda: Float8Tensor(data, exponents, torch.float32), "scales must be [torch.float32] for one scale per slice, and orig_dtype floating point, got [torch.uint8]"),
        (ValueError, lambda: Float8Tensor(data, exponents[:1], torch.float32, blocks), cover),
        (ValueError, lambda: cast_to_float8(torch.randn(4, 4), config, dim=-1), "dim=-1 is the reduced dim of an axiswise cast, but the granularity is ScalingGranularity.BLOCKWISE"),
        (ValueError, lambda: cast_to_float8(torch.randn(4), config), "one scale per block of 4 x 4 needs a tensor of 2 dims or more, got 1"),
    ]  # fmt: skip
    for kind, call, message in refused:
        assert message in raised(kind, call)
