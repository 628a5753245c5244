"""Operands whose negation torch has postponed (``z.conj().imag``) are those of their values."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from moe_layers import RECIPES as RECIPES_OF_EXPERTS
from recipe_algebra import RECIPES, config_of, operands, step
from reference import same_bits, same_cast
from torch import Tensor, nn

from fp8_dist import CastConfig, Float8Linear, Float8Tensor, cast_to_float8
from fp8_dist.debug import float8_stats
from fp8_dist.moe import Float8ExpertsConfig, grouped_linear


def lazily_negated(values: Tensor) -> Tensor:
    """The same values, as a view of their negation."""
    view = torch.complex(torch.zeros_like(values), -values).conj().imag
    assert view.is_neg()
    return view


def same_results(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(same_bits(a[name], b[name]) for name in a)


def layer(recipe: str, weight: Tensor) -> Float8Linear:
    made = Float8Linear(weight.shape[1], weight.shape[0], False, config=config_of(recipe))
    made.weight = nn.Parameter(weight)
    return made


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_operand_of_a_layer(recipe: str) -> None:
    x, w, g = operands()
    expected = step(layer(recipe, w), x, g)
    for chosen in range(3):
        lazy = [lazily_negated(t) if i == chosen else t for i, t in enumerate((x, w, g))]
        assert same_results(expected, step(layer(recipe, lazy[1]), lazy[0], lazy[2])), chosen
    observed = layer(recipe, lazily_negated(w))
    with float8_stats(observed):
        assert same_results(expected, step(observed, lazily_negated(x), lazily_negated(g)))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_folded", "mxfp8"])
def test_a_view_and_its_negation_have_casts_of_their_own(recipe: str) -> None:
    z = torch.fft.fft(torch.randn(16, 48))
    first, second = (layer(recipe, w) for w in torch.randn(2, 80, 48))
    kept = first(z.imag)  # autograd keeps the cast
    assert same_bits(second(z.conj().imag), second((-z.imag).contiguous()))
    assert kept.requires_grad


@pytest.mark.parametrize("recipe", RECIPES_OF_EXPERTS)
def test_each_operand_of_experts(recipe: str) -> None:
    counts = [40, 0, 24]
    x, w, g = torch.randn(64, 96), torch.randn(3, 32, 96), torch.randn(64, 32)

    def products(x: Tensor, w: Tensor, g: Tensor) -> Sequence[Tensor]:
        x, w = x.requires_grad_(), w.requires_grad_()
        config = Float8ExpertsConfig.from_recipe_name(recipe)
        output = grouped_linear(x, w, torch.tensor([*accumulate(counts)]), config)
        assert isinstance(output, Tensor)
        return output, *torch.autograd.grad(output, (x, w), g)

    expected = products(x.clone(), w.clone(), g)
    for chosen in range(3):
        lazy = [lazily_negated(t) if i == chosen else t.clone() for i, t in enumerate((x, w, g))]
        found = products(lazy[0], lazy[1], lazy[2])
        assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True)), chosen


CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tensorwise": lambda x: cast_to_float8(x, CastConfig()),
    "by rows": lambda x: cast_to_float8(x, config_of("rowwise").cast_config_input, dim=-1),
    "in blocks": lambda x: cast_to_float8(x, config_of("mxfp8").cast_config_input),
}


@pytest.mark.parametrize("kind", CASTS)
def test_a_cast_by_hand(kind: str) -> None:
    x = torch.randn(8, 64)
    expected, found = CASTS[kind](x), CASTS[kind](lazily_negated(x))
    assert isinstance(expected, Float8Tensor)
    assert isinstance(found, Float8Tensor)
    assert same_cast(expected, found)
