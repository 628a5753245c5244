"""Folds of the gradients of groups: the portable bits, and those of one layer after the other."""

import math
from itertools import pairwise

import pytest
import torch
from reference import same_bits, same_values
from torch import Tensor

from fp8_dist.kernels.folding import fold_gradient, fold_groups
from fp8_dist.kernels.quantization import cast_fresh

E4M3 = torch.float8_e4m3fn


def powers_of_2(*shape: int, spread: float = 4.0) -> Tensor:
    return torch.randn(shape).mul(spread).floor().exp2()


def cast(counts: list[int], columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of groups, cast by rows: their data, their scales, and the group of each."""
    rows = sum(counts)
    grad = torch.randn(rows, columns) * powers_of_2(rows, 1) * powers_of_2(1, columns, spread=2)
    _, scale, qdata = cast_fresh(grad.bfloat16(), E4M3, True, [False], True)
    return qdata, scale, torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


@pytest.mark.parametrize(
    ("counts", "columns"),
    [([5, 0, 33, 1], 70), ([0, 0], 8), ([3], 1), ([300, 700], 600), ([2], 300_000)],
)
def test_each_group_is_a_layer(counts: list[int], columns: int) -> None:
    qdata, scale, group = cast(counts, columns)
    s, t = powers_of_2(len(counts), columns), powers_of_2(sum(counts))
    arguments = qdata, scale, s, t, group, len(counts)
    found = fold_groups(*arguments)
    assert all(map(same_bits, found, fold_groups.portable(*arguments)))
    alone = fold_groups(*arguments[:3], None, *arguments[4:])
    alone += fold_groups(*arguments[:2], None, *arguments[3:])
    assert all(map(same_bits, found, alone))
    ends = torch.tensor([0, *counts]).cumsum(0).tolist()
    for i, (begin, end) in enumerate(pairwise(ends)):
        values = qdata[begin:end].float() * scale[begin:end]
        layer = fold_gradient.portable(values, E4M3, s[i], t[begin:end], False)
        own = [*(each[begin:end] for each in found[:3]), found[3][i : i + 1]]
        assert all(map(same_bits, own, layer))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("of", ["scale", "weight_scale", "input_scale"])
def test_what_is_not_finite_stays_in_its_group(of: str, value: float) -> None:
    qdata, scale, group = cast([4, 3], 9)
    s, t = powers_of_2(2, 9), powers_of_2(7)
    {"scale": scale[2], "weight_scale": s[0, 4:5], "input_scale": t[2:3]}[of].fill_(value)
    for fold in (fold_groups, fold_groups.portable):
        g1, scale1, g2, scale2 = fold(qdata, scale, s, t, group, 2)
        rows, groups = (g1.float() * scale1).isnan().all(1), (scale2 * 0).isnan().all(1)
        wrong = {"scale": [2], "weight_scale": [0, 1, 2, 3], "input_scale": []}[of]
        assert rows.nonzero().flatten().tolist() == wrong
        assert groups.tolist() == [of != "weight_scale", False]
        assert not (g2[4:].float() * scale2[1]).isnan().any()
    # Data with a scale that is not finite may differ.
    mine, theirs = (f(qdata, scale, s, t, group, 2) for f in (fold_groups, fold_groups.portable))
    assert same_values(mine[1], theirs[1])
    assert same_values(mine[3], theirs[3])
