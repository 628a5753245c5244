"""docs/recipes.md, numerics.md and communication.md: their code runs, and recipes are as shown."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from fp8_dist import Float8Linear, Float8LinearConfig, Float8LinearRecipeName
from fp8_dist.config import Operand
from fp8_dist.dtypes import short_name

DOCS = Path(__file__).parents[2] / "docs"


def run_code(page: str, **scope: Any) -> dict[str, Any]:
    """The names after the one block of Python of a page."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.M)
    exec(code, scope)
    return scope


def test_recipes_converts_a_model() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    config = run_code("recipes.md", model=model)["config"]
    assert config.fsdp_float8_all_gather
    assert isinstance(model[0], Float8Linear)
    assert model[0].config.fold_row_scales


def test_numerics_sets_the_rule_of_every_operand() -> None:
    config = run_code("numerics.md")["config"]
    casts = [config.cast_config_input, config.cast_config_weight, config.cast_config_grad_output]
    assert [(cast.scale_rule, cast.block_size) for cast in casts] == [
        ("floor", (1, 32)),
        ("floor", (32, 32)),
        ("floor", (1, 32)),
    ]


def test_communication_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    run_code("communication.md", mesh=None, model=model, x=torch.ones(2, 4), optimizer=optimizer)
    assert capsys.readouterr().out == "no collectives\n"


def test_the_table_of_recipes() -> None:
    section = (DOCS / "recipes.md").read_text().partition("## What each recipe casts")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section.partition("\n## ")[0], re.M)
    assert sorted(name for name, _ in rows) == sorted(r.value for r in Float8LinearRecipeName)
    for name, row in rows:
        *casts, gathers, _ = row.split(" | ")
        config = Float8LinearConfig.from_recipe_name(name)
        for operand, shown in zip(get_args(Operand), casts, strict=True):
            cast = getattr(config, f"cast_config_{operand}")
            assert short_name(cast.dtype_for(operand)).startswith(shown.split()[0]), (name, operand)
            assert ("then" in shown) == (config.gather_cast(operand) is None), (name, operand)
        assert ("float8" in gathers) == (config.gather_cast("weight") is not None), name
