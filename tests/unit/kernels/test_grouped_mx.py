"""The grouped GEMM of MX blocks, given to torch's operator.

A reference of the operator reads the tiles of exponents by their definition.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from reference import sqnr
from torch import Tensor

from fp8_dist.kernels import Groups, grouped
from fp8_dist.moe import Float8ExpertsConfig
from fp8_dist.moe.functions import cast_weight, grouped_product

COUNTS = [[125, 3, 0, 256], [0, 0, 7], [128, 32, 160], [1], [300, 0]]


def groups_of(counts: list[int]) -> Groups:
    sizes = torch.tensor(counts)
    return Groups.of(sizes, sizes, sum(counts))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of calls of torch's operator, which :func:`by_definition` takes the place of."""
    found: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> Tensor:
        found.append(args)
        return by_definition(*args, **kwargs)

    monkeypatch.setattr(grouped, "_grouped_mm", partial(run, out_dtype=torch.bfloat16))
    return found


def from_tiles(tiles: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """The factors of a matrix's rows, one per 32 values, from its tiles; the tiles after them."""
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    per_row = -(-columns // 4)
    tile = i // 128 * per_row + j // 4
    place = tile * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
    factors = torch.exp2(tiles.view(torch.uint8).flatten()[place].double() - 127)
    return factors, tiles.flatten()[-(-rows // 128) * per_row * 512 :]


def by_definition(
    a: Tensor, b: Tensor, a_tiles: Tensor, b_tiles: Tensor, ends: Tensor, out_dtype: torch.dtype
) -> Tensor:
    a_tiles, left, right = a_tiles.flatten(), a.double(), b.double()
    found = []
    for group, (begin, end) in enumerate(pairwise([0, *ends.tolist()])):
        if b.ndim == 3:
            x, y = left[begin:end], right[group]
            t, a_tiles = from_tiles(a_tiles, len(x), x.shape[1] // 32)
            s, _ = from_tiles(b_tiles[group], y.shape[1], len(y) // 32)
        else:
            x, y = left[:, begin:end], right[begin:end]
            t, a_tiles = from_tiles(a_tiles, len(x), x.shape[1] // 32)
            s, b_tiles = from_tiles(b_tiles.flatten(), y.shape[1], len(y) // 32)
        found.append((x * t.repeat_interleave(32, 1)) @ (y * s.repeat_interleave(32, 1).t()))
    return (torch.cat if b.ndim == 3 else torch.stack)(found).to(out_dtype)


def step(counts: list[int], n: int, k: int, stored_transposed: bool) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(sum(counts), k).bfloat16().requires_grad_()
    w = (torch.randn(len(counts), n, k) * torch.logspace(-3, 0, n)[:, None]).bfloat16()
    if stored_transposed:
        w = w.mT.contiguous().mT
    w = w.detach().requires_grad_()
    config = Float8ExpertsConfig("mxfp8")
    (output,) = grouped_product(x, [cast_weight(w, config)], groups_of(counts), config)
    return [output, *torch.autograd.grad(output, (x, w), torch.randn(output.shape).bfloat16())]


@pytest.mark.parametrize("stored_transposed", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
def test_a_step(
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    counts: list[int],
    stored_transposed: bool,
) -> None:
    """The GEMMs of a Blackwell have the results of the emulation."""
    expected = step(counts, 96, 160, stored_transposed)
    monkeypatch.setattr(grouped, "device_has_grouped_gemm", lambda device: True)
    monkeypatch.setattr(grouped, "device_kind", lambda device: "blackwell")
    found = step(counts, 96, 160, stored_transposed)
    assert len(calls) == 3
    for one, other in zip(found, expected, strict=True):
        assert sqnr(other, one) > 60  # but for the order of sums
