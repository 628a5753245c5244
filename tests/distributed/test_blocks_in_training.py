"""Blocks that shards cut, from step to step: what is cast anew, what is kept, what a NaN reaches."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ranks import RankPools
from reference import float8_gemms, same_bits
from test_mesh_grid import (
    BLOCKS,
    MESHES,
    SHAPES,
    data_of,
    linear,
    on_mesh,
    parts_of,
    stage_mesh,
    step,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from fp8_dist import (
    Float8LinearConfig,
    Float8Tensor,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)
from fp8_dist.debug import comm_audit

SHAPE = SHAPES["cut blocks"]  # on each of these meshes


def of_recipe(recipe: str, **fields: Any) -> Float8LinearConfig:
    return replace(Float8LinearConfig.from_recipe_name(recipe), **fields)


def gradients(model: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Output, input gradient and local gradients of the parameters."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    output = model(x)
    output.backward(grad)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [output.detach(), x.grad, *(getattr(g, "_local_tensor", g) for g in found)]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def differences(name: str, recipe: str) -> list[str]:
    """What differs in frozen and checkpointed models, and in one that loads another's state_dict.

    What state_dict gives is the weight in high precision.
    """
    at = MESHES[name]
    part = parts_of(at, *data_of(at, SHAPE))
    model, frozen, again, other = (on_mesh(at, SHAPE, of_recipe(recipe)) for _ in range(4))
    frozen.requires_grad_(False)
    results = {"frozen": gradients(frozen, *part), "again": gradients(Checkpointed(again), *part)}
    expected = gradients(model, *part)
    assert [len(found) for found in (*results.values(), expected)] == [2, 3, 3]
    wrong = [
        how
        for how, found in results.items()
        if not all(same_bits(a, b) for a, b in zip(expected, found, strict=False))
    ]
    precompute_float8_dynamic_scale(other)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    whole = state["0.weight"].full_tensor()  # type: ignore[attr-defined]
    assert torch.equal(whole, linear(SHAPE, of_recipe(recipe))[0].weight.detach() * 3)
    other.load_state_dict(state)
    pairs = zip(gradients(model, *part), gradients(other, *part), strict=True)
    return wrong if all(same_bits(a, b) for a, b in pairs) else [*wrong, "loaded"]


@pytest.mark.parametrize("recipe", BLOCKS)
@pytest.mark.parametrize("name", ["FSDP2 x3", "TP x3, row"])
def test_the_same_bits(ranks: RankPools, name: str, recipe: str) -> None:
    assert ranks(3).run(differences, name, recipe) == [[]] * 3


def nan_of_an_activation(name: str) -> list[list[int]]:
    """The columns of the operand's row with a NaN, on this rank: of the input or the gradient."""
    at = MESHES[name]
    x, grad = data_of(at, SHAPE)
    by_row = at.style == "row"
    (x if by_row else grad)[1, 3, 130] = math.nan
    found = step(on_mesh(at, SHAPE, of_recipe("blockwise")), *parts_of(at, x, grad))
    bad = found[0 if by_row else 1][0].dequantize().isnan()
    row = x.shape[1] + 3
    assert bad.any(1).nonzero().flatten().tolist() == ([row] if bad.any() else [])
    size = -(-SHAPE[1 if by_row else 0] // 3)
    start = size * (dist.get_rank() % 3)
    columns = (start + bad[row].nonzero().flatten()).tolist()
    return [columns[:1], columns[-1:]]


def nan_of_a_weight(name: str, precompute: bool) -> list[Any]:
    """The rows and columns that are NaN of the weight that a rank multiplies."""
    at = MESHES[name]
    model = on_mesh(at, SHAPE, of_recipe("blockwise"))
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight._local_tensor[10, 5] = math.nan  # type: ignore[union-attr]
    model[0].float8_weight.cache.drop()  # type: ignore[operator, union-attr]
    if precompute:
        precompute_float8_dynamic_scale(model)
    found = step(model, *parts_of(at, *data_of(at, SHAPE)))
    weight = found[0][1].t()
    assert isinstance(weight, Float8Tensor)
    bad = weight.dequantize().isnan()
    rows, columns = bad.any(1).nonzero().flatten(), bad.any(0).nonzero().flatten()
    assert torch.equal(bad[rows][:, columns], torch.ones(len(rows), len(columns), dtype=torch.bool))
    return [(t[0].item(), t[-1].item()) if len(t) else None for t in (rows, columns)]


def test_nan_in_one_ranks_part_of_a_block(ranks: RankPools) -> None:
    run = ranks(3).run
    # 260 and 300 columns in parts of 87 and 100: block 128 to 255 is on ranks 1 and 2.
    by_rows = run(nan_of_an_activation, "TP x3, row")
    assert by_rows == [[[], []], [[128], [173]], [[174], [255]]]
    by_columns = run(nan_of_an_activation, "TP x3, column")
    assert by_columns == [[[], []], [[128], [199]], [[200], [255]]]
    for precompute in (False, True):
        # Row 110 of 300 in parts of 100; row 110 in parts of 100; column 92 of 260 in parts of 87.
        assert run(nan_of_a_weight, "FSDP2 x3", precompute) == [[(0, 127), (0, 127)]] * 3
        by_rows = run(nan_of_a_weight, "TP x3, column", precompute)
        assert by_rows == [[(0, 99), (0, 127)], [(0, 27), (0, 127)], [None, None]]
        by_columns = run(nan_of_a_weight, "TP x3, row", precompute)
        assert by_columns == [[(0, 127), (0, 86)], [(0, 127), (0, 40)], [None, None]]


def mixed() -> list[Any]:
    """Layers with scales of blocks, and others with one scale, in one model."""
    mesh = stage_mesh((1, 1, 3, 1))
    results = []
    for distributed in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(260, 260, bias=False) for _ in range(4)))
        for index, recipe in enumerate(("blockwise", "tensorwise", "mxfp8", "rowwise_folded")):
            config = of_recipe(recipe, enable_fsdp_float8_all_gather=distributed)
            convert_to_float8_training(
                model, config=config, module_filter_fn=lambda _, name, i=index: name == str(i)
            )
        if distributed:
            fully_shard(model, mesh=mesh["shard"])
        with comm_audit(mesh) as precompute:
            precompute_float8_dynamic_scale(model)
        with comm_audit(mesh) as audit, float8_gemms() as calls:
            torch.manual_seed(1)
            model(torch.randn(45, 260)).sum().backward()
        weights = [calls[i][1] for i in range(4)]
        results.append((weights, precompute.count("all_reduce"), audit.count("all_reduce")))
    (found, sent, in_step), (expected, *_) = results
    same = [same_bits(a.dequantize(), b.dequantize()) for a, b in zip(found, expected, strict=True)]
    return [all(same), sent, in_step]


def test_a_model_that_mixes_granularities(ranks: RankPools) -> None:
    """One all-reduce for all of its exponents and amaxes, and none in the step."""
    assert ranks(3).run(mixed) == [[True, 1, 0]] * 3
