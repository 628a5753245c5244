"""Operands that are cast in the memory layout that a GPU's GEMM takes: the same results."""

from typing import Any

import pytest
import torch
from gemm_records import GemmRecord, record_gemms
from reference import same_bits

from fp8_dist import Float8Linear, Float8LinearConfig, Float8LinearRecipeName
from fp8_dist import recipe as recipes
from fp8_dist.kernels.blocks import cast_blocks
from fp8_dist.scaling import blocks

RECIPES = [recipe.value for recipe in Float8LinearRecipeName]


def step(
    recipe: str, ndim: int, weight_grad: bool, length: int = 16
) -> tuple[list[GemmRecord], list[torch.Tensor]]:
    torch.manual_seed(0)
    layer = Float8Linear(32, 48, config=Float8LinearConfig.from_recipe_name(recipe))
    layer.weight.requires_grad_(weight_grad)
    x = torch.randn(*(2, 3, length)[3 - ndim :], 32).requires_grad_()
    with record_gemms() as records:
        output = layer(x)
        output.square().sum().backward()
    return records, [
        output,
        *(each.grad for each in (x, *layer.parameters()) if each.requires_grad),
    ]


def same_but_for_zeros(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether the operand of a GEMM equals another one, padded with zeros."""
    (m, k), both = theirs.shape, (mine, theirs)
    own, whole = (x.contiguous().view(torch.uint8) for x in both)
    return torch.equal(own[:m, :k], whole) and not own[m:].any() and not own[:, k:].any()


@pytest.mark.parametrize(
    ("ndim", "weight_grad", "length"), [(3, True, 16), (2, False, 16), (2, True, 15), (1, True, 7)]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, recipe: str, ndim: int, weight_grad: bool, length: int
) -> None:
    plain, expected = step(recipe, ndim, weight_grad, length)
    monkeypatch.setattr(recipes, "takes_transposed", lambda device: True)
    transposed, found = step(recipe, ndim, weight_grad, length)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    for mine, theirs in zip(transposed, plain, strict=True):
        assert same_but_for_zeros(mine.a.qdata, theirs.a.qdata)
        assert same_but_for_zeros(mine.b.qdata, theirs.b.qdata)
        if mine.a.scale.dtype is torch.uint8:
            continue  # their GEMM is one in a wider type, which takes any layout
        # As cuBLASLt takes them: a row-major matrix by a column-major one.
        assert mine.a.qdata.is_contiguous()
        assert mine.b.qdata.t().is_contiguous()


@pytest.mark.parametrize(("recipe", "ndim"), [("blockwise", 3), ("mxfp8", 2)])
def test_blocks_that_are_cast_in_one_pass(
    monkeypatch: pytest.MonkeyPatch, recipe: str, ndim: int
) -> None:
    """As on a GPU, one operator makes the exponents and both layouts of a weight."""
    plain, expected = step(recipe, ndim, True)
    for module in (recipes, blocks):
        monkeypatch.setattr(module, "takes_transposed", lambda device: True)
    monkeypatch.setattr(blocks, "fuses_casts", lambda x: True)
    calls: list[list[bool]] = []

    def counted(*args: Any) -> list[torch.Tensor]:
        calls.append(list(args[4]))
        return cast_blocks(*args)

    monkeypatch.setattr(blocks.kernels, "cast_blocks", counted)
    transposed, found = step(recipe, ndim, True)
    assert calls == [[False, True], [False], [False]]  # of the weight, the input, the gradient
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    for mine, theirs in zip(transposed, plain, strict=True):
        assert same_but_for_zeros(mine.a.qdata, theirs.a.qdata)
        assert same_but_for_zeros(mine.b.qdata, theirs.b.qdata)
        assert mine.a.qdata.is_contiguous()
        assert mine.b.qdata.t().is_contiguous()
