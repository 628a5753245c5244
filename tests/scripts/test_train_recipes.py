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
        assert bool(run["float8_bytes"]) == (recipe in GATHER_FLOAT8 and dp * tp > 1)
        one_process = one_process or run["losses"]
        assert run["losses"] == pytest.approx(one_process, rel=2e-3)
    assert one_process[-1] < one_process[0]
