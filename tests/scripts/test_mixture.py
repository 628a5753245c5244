"""The scripts' mixture of experts: its balancing loss, and training on meshes."""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import RankPools, device_mesh

from scripts.common.llama import MODELS, Latent, LlamaConfig
from scripts.common.mixture import Mixture, Router
from scripts.train import train, train_run

QUICK = ["--steps", "3", "--warmup", "1", "--batch-size", "4", "--seq-len", "32"]
TINY = LlamaConfig(64, 2, 4, 2, 128, mixture=Mixture(8, 2, 64))
# One block is dense, one has a shared expert. Both have the attention of DeepSeek-V3; 4 ranks do
# not divide the rows of its `wkv_a`.
LATENT = replace(
    TINY, mixture=Mixture(8, 2, 64, shared=1, first_dense=1), latent=Latent(32, 46, 16, 16, 16)
)
MODEL = {"tiny": TINY, "latent": LATENT}


def trained(axes: dict[str, int], options: list[str]) -> None:
    """Run the script, with another process group and mesh; called on every rank."""
    os.environ["WORLD_SIZE"] = str(torch.distributed.get_world_size())
    with mock.patch.dict(MODELS, MODEL):
        sizes = [word for name, size in axes.items() for word in (f"--{name}", str(size))]
        args = train.parse_args([*QUICK, *sizes, *options])
        with mock.patch.object(train_run, "init_device_mesh", return_value=device_mesh(**axes)):
            train_run.train(args, torch.device("cpu"))


MESHES: tuple[dict[str, int], ...] = (
    {"dp": 1, "tp": 1},
    {"dp": 2, "ep": 2, "tp": 1},
    {"dp": 1, "ep": 2, "tp": 2},
)


@pytest.mark.parametrize(
    ("model", "recipe", "meshes"),
    [
        ("tiny", "bf16", MESHES[:2]),
        ("latent", "rowwise_folded", (MESHES[0], MESHES[2])),
    ],
)
def test_recipe_on_meshes(
    ranks: RankPools, tmp_path: Path, model: str, recipe: str, meshes: Any
) -> None:
    one: dict[str, list[float]] = {}
    for axes in meshes:
        out = tmp_path / "-".join(f"{name}{size}" for name, size in axes.items())
        options = ["--model", model, "--data", argparse.__file__, "--recipe", recipe]
        size = torch.tensor([*axes.values()]).prod().item()
        ranks(size).run(trained, axes, [*options, "--out", str(out)], timeout=180)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        found = {name: [line[name] for line in lines] for name in ("loss", "grad_norm")}
        one = one or found
        assert found["loss"] == pytest.approx(one["loss"], rel=2e-3)
        assert found["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-2)
        rows = json.loads((out / "comm.json").read_text())
        sent = {row["dtype"] for row in rows if row["op"] == "all_to_all"}
        assert bool(sent) == (size > 1)
        assert ("torch.float8_e4m3fn" in sent) == (size > 1 and recipe != "bf16")
    assert one["loss"][-1] < one["loss"][0]


def test_balancing_loss() -> None:
    router, x = Router(16, Mixture(4, 2, 16, balance=0.5)), torch.randn(3, 20, 16)
    ids, shares = router(x)
    factors = torch.randn_like(shares)
    (found,) = torch.autograd.grad((shares * factors).sum(), router.parameters())
    scores = router.gate(x).softmax(-1)
    best = scores.gather(-1, ids.unflatten(0, (3, 20)))
    own = (best / best.sum(-1, keepdim=True)).flatten(0, 1)
    assert torch.equal(shares, own)
    balance = sum(
        (ids.view(3, -1)[i] == expert).float().mean() * scores[i, :, expert].mean() * 4 / 3
        for i in range(3)
        for expert in range(4)
    )
    loss = (own * factors).sum() + 0.5 * balance
    torch.testing.assert_close(found, torch.autograd.grad(loss, router.parameters())[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model debug --ep 4", "--ep 4 needs a --model with experts"),
        (
            "--recipe delayed --ep 2",
            "--recipe delayed is not for experts: use one of bf16, rowwise_",
        ),
        ("--ep 2 --tp 2 --seq-len 31", "--tp 2 does not divide the --seq-len 31"),
        ("--dp 2 --tp 4", "--dp 2 times --tp 4 is 8, but there are 4 ranks"),
        ("--dp 2 --ep 4", "--dp 2 times --ep 4 times --tp 1 is 8, but there are 4 ranks"),
        ("--ep 4 --batch-size 2", "--batch-size 2 is not a multiple of --dp 1 times --ep 4"),
        ("--model few --ep 4", "--ep 4 times --tp 1 does not divide the 2 experts"),
        ("--compile", "--compile is not for --model moe: FSDP2's hooks break its graphs"),
        ("--gradient-transport bf16", "--gradient-transport is not for --model moe: experts have"),
    ],
)
def test_refused_options(capsys: pytest.CaptureFixture[str], options: str, message: str) -> None:
    few = replace(TINY, mixture=Mixture(2, 2, 64))
    with (
        mock.patch.dict(os.environ, WORLD_SIZE="4"),
        mock.patch.dict(MODELS, few=few),
        pytest.raises(SystemExit, match=r"^2$"),
    ):
        train.parse_args(["--model", "moe", *options.split()])
    assert message in capsys.readouterr().err
