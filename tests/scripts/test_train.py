"""The training script: its text, options and devices, and the files of a run."""

import json
import math
import os
import shutil
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import run
from ranks import RankPools

import fp8_dist
from fp8_dist.debug import replay
from fp8_dist.report.data import read_run
from fp8_dist.report.headline import headline
from scripts.common.corpus import Corpus
from scripts.train import train, train_run
from scripts.train.options import make_parser, parse_options
from scripts.train.run_writer import MEMORY
from scripts.train.train_run import choose_device

ROOT = Path(train.__file__).parents[2]
QUICK = ["--steps", "3", "--warmup", "1", "--batch-size", "4", "--seq-len", "32"]


@pytest.fixture
def small_text(tmp_path: Path) -> Path:
    """A file with a kilobyte of text."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"All work and no play makes float8 a dull dtype.\n" * 21)
    return path


def test_ranks_share_the_rows_of_one_global_batch():
    corpus, rows = Corpus(bytearray(range(256)), "a test"), {"batch_size": 6, "seq_len": 8}
    whole = corpus.batch(seed=1, step=7, **rows)
    parts = [corpus.batch(seed=1, step=7, **rows, rank=rank, ranks=3) for rank in range(3)]
    for index in range(2):
        assert whole[index].shape == (6, 8)
        assert whole[index].dtype == torch.int64
        assert torch.equal(whole[index], torch.cat([part[index] for part in parts]))
    assert torch.equal(whole[0] + 1, whole[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dp 3 --tp 2", "there are 4 ranks: start that many (torchrun --nproc-per-node 6)"),
        ("--batch-size 6", "--batch-size 6 is not a multiple of --dp 4"),
        ("--lr nan", "--lr must be positive and finite"),
        ("--step 3", "unrecognized arguments: --step 3"),
        ("--data nowhere", "--data: nowhere: no such file or folder"),
        ("--data text.txt --seq-len 1008", "give a longer text or use shorter rows"),
        ("--micro-batches 5", "--batch-size 16 is not a multiple of --micro-batches"),
        ("--micro-batches 8", "--micro-batches needs a --gradient-transport where --dp is 2"),
        (
            "--reduce-transport float8 --tp 2",
            "--reduce-transport needs --tp 2 or more and a float8",
        ),
        ("--stats-every 2", "--stats-every and --record are for float8 recipes"),
        (
            "--recipe tensorwise --weight-format mxfp4",
            "--weight-format mxfp4 is for --recipe mxfp8 or blockwise",
        ),
    ],
)
def test_refused_options(
    options: str,
    message: str,
    small_text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.chdir(small_text.parent)
    with pytest.raises(SystemExit, match=r"^2$"):
        train.parse_args(options.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "device", "reason"),
    [
        (0, "cpu", ""),
        (1, "cpu", "2 ranks need as many GPUs, this machine has 1"),
        (2, "cuda:1", ""),
    ],
)
def test_ranks_train_on_gpus_when_each_has_one(monkeypatch, gpus, device, reason):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert choose_device(local_rank=1, local_ranks=2) == (torch.device(device), reason)


def run_script(out: Path, *options: str) -> list[dict[str, float]]:
    """Train in a new process, without torchrun, and return its metrics."""
    finished = run(
        [sys.executable, "-m", "scripts.train.train", *QUICK, *options, "--out", str(out)],
        env=dict(os.environ, CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT)),
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert "Collectives of one training step" in finished.stdout
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_one_process_trains_and_writes_everything(tmp_path, small_text):
    metrics = run_script(tmp_path, "--data", str(small_text), "--recipe", "tensorwise")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert metrics[0]["loss"] == pytest.approx(5.55, abs=0.1)
    assert metrics[2]["loss"] < metrics[0]["loss"]
    for line in metrics:
        assert list(line) == [
            "step",
            "loss",
            "tokens_per_second",
            "grad_norm",
            "learning_rate",
            "memory_bytes",
            *(["seconds_per_step"] if line["step"] > 1 else []),
        ]
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] > 0
        assert 2**26 < line["memory_bytes"] < 2**36  # torch alone needs more than 64 MiB
    assert [line["learning_rate"] for line in metrics] == [1e-3, 1e-3, 5e-4]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["memory"] == MEMORY["cpu"]
    assert (config["torch"], config["fp8_dist"]) == (torch.__version__, fp8_dist.__version__)
    assert (config["recipe"], config["parameters"]) == ("tensorwise", 853120)
    assert (tmp_path / "comm.txt").read_text().strip()
    assert isinstance(json.loads((tmp_path / "comm.json").read_text()), list)


def test_statistics_of_some_steps(small_text: Path, tmp_path: Path) -> None:
    """A continued run keeps the lines of earlier steps, and has each other step once."""
    out = tmp_path / "run"
    options = [*QUICK, "--data", str(small_text), "--recipe", "tensorwise", "--out", str(out)]
    options += ["--stats-every", "1", "--checkpoint-every", "2"]
    train.main(options)
    lines = (out / "float8_stats.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    layers = json.loads((out / "config.json").read_text())["float8_layers"]
    for step in (1, 2, 3):
        step_rows = [row for row in rows if row["step"] == step]
        assert {row["fqn"] for row in step_rows} == set(layers)
        assert [row["kind"] for row in step_rows].count("cast") == 3 * len(layers)
    shutil.rmtree(out / "checkpoints" / "step-00000003")
    train.main([*options, "--resume", "auto"])
    assert (out / "float8_stats.jsonl").read_text().splitlines() == lines
    shutil.rmtree(out / "checkpoints")
    train.main([*options[:-4], "--steps", "1"])  # a new run deletes them
    assert not (out / "float8_stats.jsonl").exists()


class Planted(train_run.Trainer):
    """A Trainer in which an input of a layer is NaN on rank 1 in step 3."""

    LAYER = "layers.1.feed_forward.w1"

    def step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        def plant(_: torch.nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
            x = args[0].clone()
            x[1, 2, 3] = math.nan
            return x

        if (step, dist.get_rank()) != (3, 1):
            return super().step(step)
        with dict(self.model.named_modules())[self.LAYER].register_forward_pre_hook(plant):
            return super().step(step)


def train_planted(text: Path, out: Path, *options: str) -> None:
    """Train with the planted NaN; called on every rank."""
    argv = [*QUICK, "--steps", "4", "--data", str(text), "--recipe", "tensorwise", *options]
    args = parse_options(make_parser("", ""), [*argv, "--out", str(out)], world_size=2)
    with mock.patch.object(train_run, "Trainer", Planted), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warnings name recordings
        train_run.train(args, torch.device("cpu"))


def test_a_report_names_a_nan(
    ranks: RankPools, small_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Statistics of every second step first see the NaN in step 4, in another layer and rank."""
    options = "--stats-every", "2", "--record", "layers.1.*"
    ranks(2).run(train_planted, small_text, tmp_path, *options)
    anomaly = json.loads((tmp_path / "anomalies.jsonl").read_text().splitlines()[0])
    assert (anomaly["step"], anomaly["fqn"]) == (4, "layers.0.attention.wq")
    capsys.readouterr()
    found = headline(read_run(tmp_path))
    assert found is not None
    assert found.where == f"step 3, rank 1, {Planted.LAYER}"
    # (Row 34 of the rank is the third token of its second text.)
    assert found.what == "input (for output, grad_weight), element [34, 3]: NaN or infinite."
    command = f"python -m fp8_dist.debug.replay {tmp_path / 'recordings' / 'step000003'}"
    assert found.commands == [command]
    assert replay.main([command.split()[-1]]) == 1
    assert "element [34, 3] on rank 1: NaN or infinite" in capsys.readouterr().out
