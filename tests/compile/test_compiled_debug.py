"""capture and compare_recipes of compiled models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Net
from reference import same_bits
from torch import nn
from torch._dynamo.utils import counters

from fp8_dist import Float8LinearConfig, convert_to_float8_training
from fp8_dist.debug import CapturedCast, capture, compare_recipes, load_capture

RECIPES = ["tensorwise", "rowwise_folded"]


def batch() -> torch.Tensor:
    return torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))


def compiled(net: nn.Module, backend: str) -> Any:
    torch._dynamo.reset()
    counters.clear()
    for layer in net.layers:  # type: ignore[union-attr]
        layer.compile(backend=backend, fullgraph=True)
    return net


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        ("rowwise_folded", "aot_eager"),
        ("delayed", "aot_eager"),
        pytest.param("tensorwise", "inductor", marks=pytest.mark.full),
    ],
)
def test_compiled_code_is_captured(tmp_path: Path, recipe: str, backend: str) -> None:
    config = Float8LinearConfig.from_recipe_name(recipe)

    def saved(net: nn.Module, folder: Path) -> dict[Any, CapturedCast]:
        recorded = capture(net, folder, steps=[1])
        for _ in range(3):
            with recorded:
                net(batch()).square().mean().backward()
        files = map(load_capture, recorded.files)
        return {(c.fqn, c.operand, c.gemms, c.call): c for c in files}

    net = compiled(convert_to_float8_training(Net(), config=config), backend)
    mine = saved(net, tmp_path / "compiled")
    its = saved(convert_to_float8_training(Net(), config=config), tmp_path / "eager")
    assert mine.keys() == its.keys()
    for key, cast in mine.items():
        other, (fqn, operand, *_) = its[key], key
        assert abs(cast.stats().sqnr - other.stats().sqnr) < 0.5
        # What no compiled operator of another kind has made is the same, bit for bit.
        if operand == "weight" or (operand == "input" and fqn in ("layers.0.w1", "layers.0.w3")):
            for name in ("high", "qdata", "scale"):
                assert same_bits(getattr(cast, name), getattr(other, name)), (fqn, operand, name)


def test_a_compiled_model_is_compared_in_eager_code_and_stays_compiled() -> None:
    expected = compare_recipes(Net(), batch(), recipes=RECIPES).to_dicts()
    net = compiled(Net(), "aot_eager")
    before = net(batch())
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    found = compare_recipes(net, batch(), recipes=RECIPES).to_dicts()
    assert found == expected
    assert compare_recipes(torch.compile(Net(), backend="eager"), batch(), recipes=RECIPES)  # type: ignore[arg-type]
    assert torch.equal(net(batch()), before)
    assert counters["stats"]["unique_graphs"] == graphs
