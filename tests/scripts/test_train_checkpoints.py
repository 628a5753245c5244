"""Checkpoints of training runs: which runs resume, with which bits, and which are refused."""

import argparse
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from processes import run as run_program
from ranks import RankPools, device_mesh
from reference import json_lines

from scripts.common.llama import MODELS, LlamaConfig
from scripts.train import train, train_run
from scripts.train.checkpoints import checkpoints_in

ROOT = Path(__file__).parents[2]
TINY = LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128)
OPTIONS = ["--model", "tiny", "--steps", "6", "--warmup", "2", "--batch-size", "4"]
OPTIONS += ["--seq-len", "32", "--data", argparse.__file__, "--checkpoint-every", "2"]
RESUME = ("--resume", "auto")


class Stopped(Exception):
    """An exception that ends a run."""


def run(out: str, dp: int, tp: int, *options: str, stop_at: int = 0) -> None:
    """Run the script up to a step, with the test's processes and mesh; called on every rank."""
    os.environ["WORLD_SIZE"] = str(dp * tp)
    step = train_run.Trainer.step

    def stopping(self: train_run.Trainer, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if number == stop_at:
            raise Stopped
        return step(self, number)

    with (
        mock.patch.dict(MODELS, tiny=TINY),
        mock.patch.object(train_run, "init_device_mesh", return_value=device_mesh(dp=dp, tp=tp)),
        mock.patch.object(train_run.Trainer, "step", stopping),
        suppress(Stopped),
    ):
        args = train.parse_args([*OPTIONS, *options, "--out", out, "--tp", str(tp)])
        train_run.train(args, torch.device("cpu"))


def metrics(out: Path) -> list[tuple[int, float, float]]:
    lines = json_lines(out / "metrics.jsonl")
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def steps_in(out: Path) -> list[int]:
    return list(checkpoints_in(out / "checkpoints"))


def test_a_resumed_run_is_the_uninterrupted_one(ranks: RankPools, tmp_path: Path) -> None:
    """The bits are equal on the same mesh, and close on another."""
    whole, stopped, other = (tmp_path / name for name in ("whole", "stopped", "other"))
    options = ("--recipe", "delayed")
    ranks(2).run(run, str(whole), 1, 2, *options)
    ranks(2).run(run, str(stopped), 1, 2, *options, *RESUME, stop_at=4)
    assert steps_in(stopped) == [2]
    assert metrics(stopped) == metrics(whole)[:3]
    shutil.copytree(stopped, other)
    ranks(2).run(run, str(other), 2, 1, *options, *RESUME)
    assert metrics(other)[:2] == metrics(whole)[:2]
    for found, expected in zip(metrics(other), metrics(whole), strict=True):
        assert found == pytest.approx(expected, rel=1e-2)
    ranks(2).run(run, str(stopped), 1, 2, *options, *RESUME)
    assert metrics(stopped) == metrics(whole)
    assert steps_in(stopped) == [6, 4]
    assert (stopped / "comm.json").exists()


def test_a_run_continues_on_fewer_ranks(ranks: RankPools, tmp_path: Path) -> None:
    parts = "--micro-batches", "4", "--gradient-transport", "float8", "--recipe", "tensorwise"
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    ranks(1).run(run, str(whole), 1, 1, *parts)
    ranks(2).run(run, str(moved), 2, 1, *parts, stop_at=5)
    assert steps_in(moved) == [4, 2]
    ranks(1).run(run, str(moved), 1, 1, *parts, *RESUME)
    assert metrics(moved) == metrics(whole)


def test_another_recipe_continues(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(run, str(tmp_path), 2, 1, "--recipe", "bf16", stop_at=4)
    ranks(2).run(run, str(tmp_path), 2, 1, "--recipe", "delayed", *RESUME)
    assert [step for step, *_ in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_new_run_does_not_mix_its_files_with_others(
    ranks: RankPools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(1).run(run, str(tmp_path), 1, 1, stop_at=3)
    with mock.patch.dict(MODELS, tiny=TINY), pytest.raises(SystemExit):
        train.parse_args([*OPTIONS, "--out", str(tmp_path)])
    assert "continue it with --resume auto, or choose another --out" in capsys.readouterr().err


# Before torchrun's restart, the last rank dies once its files of the checkpoint of step 4 are
# written.
KILLED = f"""
import os, signal, sys
from torch.distributed.checkpoint import FileSystemWriter
from scripts.common.llama import MODELS, LlamaConfig
from scripts.train import checkpoints, train

class Writer(FileSystemWriter):
    def write_data(self, *args):
        written = super().write_data(*args)
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and os.environ["RANK"] == "1" and "step-00000004" in str(self.path):
            os.kill(os.getpid(), signal.SIGKILL)
        return written

checkpoints.FileSystemWriter = Writer
MODELS["tiny"] = {TINY!r}
train.main(os.environ["OPTIONS"].split())
"""


def test_a_run_survives_a_killed_rank(ranks: RankPools, tmp_path: Path) -> None:
    """torchrun's restart continues from the checkpoint before the unfinished one."""
    whole, out, program = tmp_path / "whole", tmp_path / "out", tmp_path / "program.py"
    program.write_text(KILLED)
    options = ["--recipe", "delayed", *RESUME]
    launcher = "-m forking_torchrun --max-restarts 1 --nproc-per-node 2"
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests/support")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    environment["OPTIONS"] = " ".join([*OPTIONS, *options, "--out", str(out)])
    command = [sys.executable, *launcher.split(), str(program)]
    done = run_program(command, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"continues in {out}/checkpoints after step 2" in done.stdout
    ranks(2).run(run, str(whole), 2, 1, *options)
    assert metrics(out) == metrics(whole)
    assert steps_in(out) == [6, 4]
    assert list((out / "checkpoints").glob(".*")) == []
