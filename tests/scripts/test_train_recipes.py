"""Training with every recipe: what follows the optimizer's step, and meshes."""

import argparse
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import RankPools, device_mesh

from scripts.common.candidates import RECIPES
from scripts.common.llama import MODELS, LlamaConfig
from scripts.train import compare, train

TINY = LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128)
QUICK = ["--steps", "3", "--warmup", "1", "--batch-size", "4", "--seq-len", "32"]
GATHER_FLOAT8 = ["tensorwise", "rowwise_folded", "blockwise", "mxfp8", "delayed"]


def test_weights_are_gathered_in_float8_where_the_recipe_allows_it():
    assert [recipe for recipe in RECIPES if compare.gathers_float8(recipe)] == GATHER_FLOAT8


def train_on_ranks(dp: int, tp: int, options: list[str]) -> None:
    """Runs on every rank: all that the script does, but for its process group and its mesh."""
    os.environ["WORLD_SIZE"] = str(dp * tp)
    with mock.patch.dict(MODELS, tiny=TINY):
        args = train.parse_args([*QUICK, *options, "--model", "tiny", "--tp", str(tp)])
        mesh = device_mesh(dp=dp, tp=tp)
        with mock.patch.object(train, "init_device_mesh", return_value=mesh):
            train.train(args, torch.device("cpu"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_on_meshes(ranks: RankPools, tmp_path: Path, recipe: str):
    one_process: list[float] = []
    meshes = ((1, 1), (2, 1), (1, 2), (2, 2)) if recipe == "tensorwise" else ((1, 1), (2, 2))
    for dp, tp in meshes:
        out = tmp_path / f"{dp}x{tp}"
        options = ["--data", argparse.__file__, "--recipe", recipe, "--out", str(out)]
        ranks(dp * tp).run(train_on_ranks, dp, tp, options, timeout=180)
        run = compare.read_run(out)
        assert run["unexpected_gathers"] == []
        assert bool(run["float8_bytes"]) == (recipe in GATHER_FLOAT8 and dp * tp > 1)
        one_process = one_process or run["losses"]
        assert run["losses"] == pytest.approx(one_process, rel=2e-3)
    assert one_process[-1] < one_process[0]


@pytest.mark.parametrize("mixed", [True, False])
def test_scales_travel_with_their_rows(mixed: bool):
    """Four rows of 16 and their scales, in one gather or not."""
    shared = {"op": "all_gather", "axis": "dp", "module": "layer", "in_mixed_gather": mixed}
    rows = [
        {"dtype": "torch.float8_e4m3fn", "elements": 64, "float8_bytes": 64, "count": 1},
        {"dtype": "torch.float32", "elements": 4, "float8_bytes": 0, "count": 0},
    ]
    config = {"float8_layers": ["layer.a"], "high_precision_gather": {}}
    unexpected = compare.unexpected_gathers([shared | row for row in rows], config)
    assert (unexpected == []) is mixed


@pytest.mark.parametrize(
    ("recipe", "problems"),
    [
        ("rowwise", []),
        ("rowwise_folded", ["rowwise_folded communicated nothing in float8"]),
    ],
)
def test_comparison_of_a_run_that_gathers_in_high_precision(recipe: str, problems: list[str]):
    runs = [
        {
            "name": name,
            "losses": [5.5] + [3.0] * 20,
            "tokens_per_second": 1.0,
            "bytes": 8,
            "float8_bytes": 0,
            "all_gather_bytes": 8,
            "gathers_float8": compare.gathers_float8(name),
            "unexpected_gathers": [],
        }
        for name in ("bf16", recipe)
    ]
    assert compare.problems(*runs) == problems
    gathers = "rowwise gathers in high precision"
    assert compare.report(*runs).endswith(gathers) == (recipe == "rowwise")
