"""Checkpoints of training runs: what resumes, what is refused, what a full disk does."""

import argparse
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import RankPools, device_mesh

from scripts.common.llama import MODELS, LlamaConfig
from scripts.train import checkpoints, manifest, train
from scripts.train.fault_test import DAMAGES, do_damage
from scripts.train.manifest import DamagedCheckpoint, checkpoints_in, folder_of, read_checkpoint
from scripts.train.stop import StopRequest

TINY = LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128)
OPTIONS = ["--model", "tiny", "--steps", "6", "--warmup", "2", "--batch-size", "4"]
OPTIONS += ["--seq-len", "32", "--data", argparse.__file__, "--checkpoint-every", "2"]


class StopAfter(StopRequest):
    """Gets SIGTERM in a step, on the last rank alone."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.left = step

    def agreed(self, group: dist.ProcessGroup) -> str:
        self.left -= 1
        if self.left == 0 and dist.get_rank() == dist.get_world_size() - 1:
            self.handle(15, None)
        return super().agreed(group)


def run(out: str, dp: int, tp: int, *options: str, steps: int = 0, fail_at: int = 0) -> bool:
    """Runs on every rank: the script, but for its processes and its mesh; it gets SIGTERM in the
    given one of its steps, if any, and the last rank's disk is full at the given checkpoint."""
    os.environ["WORLD_SIZE"] = str(dp * tp)

    class Writer(checkpoints.FileSystemWriter):
        written = 0

        def write_data(self, *args: Any) -> Any:
            Writer.written += 1
            if Writer.written == fail_at and dist.get_rank() == dist.get_world_size() - 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")
            return super().write_data(*args)

    with (
        mock.patch.dict(MODELS, tiny=TINY),
        mock.patch.object(train, "init_device_mesh", return_value=device_mesh(dp=dp, tp=tp)),
        mock.patch.object(checkpoints, "FileSystemWriter", Writer),
    ):
        args = train.parse_args([*OPTIONS, *options, "--out", out, "--tp", str(tp)])
        return train.train(args, torch.device("cpu"), stop=StopAfter(steps) if steps else None)


def metrics(out: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def steps_in(out: Path) -> list[int]:
    return list(checkpoints_in(out / "checkpoints"))


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "delayed"])
def test_a_resumed_run_is_the_uninterrupted_one(
    ranks: RankPools, tmp_path: Path, recipe: str
) -> None:
    """Bit for bit on its mesh; close on another."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert ranks(4).run(run, str(whole), 2, 2, "--recipe", recipe) == [True] * 4
    # The random generators are those of the step, whatever was done before it.
    assert ranks(4).run(run, str(stopped), 2, 2, "--recipe", recipe, steps=3) == [True] * 4
    assert steps_in(stopped) == [3, 2]
    for ranks_, dp, tp in [(2, 2, 1), (1, 1, 1)] if recipe in ("bf16", "delayed") else []:
        other = tmp_path / f"{dp}x{tp}"
        shutil.copytree(stopped, other)
        ranks(ranks_).run(run, str(other), dp, tp, "--recipe", recipe, "--resume", "auto")
        assert [step for step, *_ in metrics(other)] == [1, 2, 3, 4, 5, 6]
        for found, expected in zip(metrics(other), metrics(whole), strict=True):
            assert found == pytest.approx(expected, rel=5e-3)
        assert metrics(other)[:3] == metrics(whole)[:3]
    ranks(4).run(run, str(stopped), 2, 2, "--recipe", recipe, "--resume", "auto")
    assert metrics(stopped) == metrics(whole)
    assert steps_in(stopped) == [6, 4]
    # Nothing is left to do, and nothing is done.
    ranks(4).run(run, str(stopped), 2, 2, "--recipe", recipe, "--resume", "auto")
    assert metrics(stopped) == metrics(whole)
    assert (stopped / "comm.json").exists()


def test_a_resumed_run_has_the_errors_of_gradients(ranks: RankPools, tmp_path: Path) -> None:
    wire = ["--gradient-transport", "float8"]
    feedback = [*wire, "--error-feedback"]
    whole, stopped, without = (tmp_path / name for name in ("whole", "stopped", "without"))
    ranks(4).run(run, str(whole), 2, 2, *feedback)
    ranks(4).run(run, str(stopped), 2, 2, *feedback, steps=3)
    shutil.copytree(stopped, without)
    ranks(4).run(run, str(stopped), 2, 2, *feedback, "--resume", "auto")
    assert metrics(stopped) == metrics(whole)
    ranks(4).run(run, str(without), 2, 2, *wire, "--resume", "auto")
    # Step 4 begins with the same weights, and reduces its gradient without the errors.
    assert metrics(without)[3][1] == metrics(whole)[3][1]
    assert metrics(without)[3][2] != metrics(whole)[3][2]


def step_after_reload(out: str, recipe: str) -> tuple[float, float]:
    """Runs on every rank: loss and gradient norm of step 3, in a process that has trained on other
    steps with other weights before it loads."""
    os.environ["WORLD_SIZE"] = "2"
    with mock.patch.dict(MODELS, tiny=TINY):
        args = train.parse_args(
            [*OPTIONS, "--out", out, "--recipe", recipe, "--resume", "auto", "--lr", "0.1"]
        )
        trainer = train.Trainer(args, device_mesh(dp=2, tp=1), torch.device("cpu"))
    for step in (5, 6):
        trainer.step(step)
    found = checkpoints.choose(Path(out) / "checkpoints", "auto")
    assert found is not None
    trainer.resume(*found)
    loss, norm = trainer.step(3)
    return trainer.mean_over_ranks(loss), norm.item()


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_the_first_forward_uses_no_old_scale(ranks: RankPools, tmp_path: Path, recipe: str) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    ranks(2).run(run, str(whole), 2, 1, "--recipe", recipe)
    ranks(2).run(run, str(out), 2, 1, "--recipe", recipe, steps=2)
    expected = metrics(whole)[2][1:]
    assert ranks(2).run(step_after_reload, str(out), recipe) == [expected] * 2


@pytest.mark.parametrize(("recipe", "other"), [("bf16", "delayed"), ("delayed", "bf16")])
def test_another_recipe_continues(
    ranks: RankPools, tmp_path: Path, recipe: str, other: str
) -> None:
    ranks(2).run(run, str(tmp_path), 2, 1, "--recipe", recipe, steps=2)
    ranks(2).run(run, str(tmp_path), 2, 1, "--recipe", other, "--resume", "auto")
    assert [step for step, *_ in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_harms_no_checkpoint(ranks: RankPools, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    ranks(2).run(run, str(whole), 2, 1, "--keep", "9")
    assert ranks(2).run(run, str(out), 2, 1, "--keep", "9", fail_at=2) == [True, True]
    assert steps_in(out) == [6, 2]
    assert metrics(out) == metrics(whole)
    for path in checkpoints_in(out / "checkpoints").values():
        read_checkpoint(path)
    assert [path.name for path in (out / "checkpoints").glob(".*")] == []
    # The last one of a run is needed: its failure is the run's.
    last = tmp_path / "last"
    assert ranks(2).run(run, str(last), 2, 1, steps=3, fail_at=2) == [False, False]


@pytest.mark.parametrize("writes", [True, False])
def test_a_run_does_not_mix_its_files_with_others(
    ranks: RankPools, tmp_path: Path, capsys: pytest.CaptureFixture[str], writes: bool
) -> None:
    (good,) = ranks(1).run(run, str(tmp_path), 1, 1, steps=3)
    assert good
    with mock.patch.dict(MODELS, tiny=TINY), pytest.raises(SystemExit):
        train.parse_args([*(OPTIONS if writes else OPTIONS[:-2]), "--out", str(tmp_path)])
    assert "continue it with --resume auto, or choose another --out" in capsys.readouterr().err
    older = folder_of(tmp_path / "checkpoints", 2)
    for path, message in {
        str(older): "has later checkpoints than .*step-00000002, up to step 3",
        str(tmp_path / "nowhere"): "nowhere does not exist",
    }.items():
        with pytest.raises(Exception, match=f"RefusedCheckpoint: .*{message}"):
            ranks(1).run(run, str(tmp_path), 1, 1, "--resume", path)
    with pytest.raises(Exception, match=r"is of --model tiny, and this run of --model debug"):
        ranks(1).run(run, str(tmp_path), 1, 1, "--resume", "auto", "--model", "debug")
    elsewhere = tmp_path / "elsewhere"
    ranks(1).run(run, str(elsewhere), 1, 1, "--resume", str(older))
    assert [step for step, *_ in metrics(elsewhere)] == [3, 4, 5, 6]


def written(root: Path, step: int) -> Path:
    """A checkpoint of two files without a meaning."""
    folder = manifest.unfinished_folder_of(root, step)
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"m" * 10)
    (folder / "__0_0.distcp").write_bytes(bytes(range(200)))
    facts = {"mesh": {"dp": 1, "tp": 1}, "recipe": "bf16", "model": "tiny"}
    return manifest.publish(root, step, facts)


@pytest.mark.parametrize("damage", [*DAMAGES, "bad manifest", "no table"])
def test_damaged_checkpoints_are_named(tmp_path: Path, damage: str) -> None:
    path = written(tmp_path, 1)
    assert read_checkpoint(path)["step"] == 1
    described = json.loads((path / "manifest.json").read_text())
    if damage == "bad manifest":
        (path / "manifest.json").write_text("{")
    elif damage == "no table":
        del described["files"][".metadata"]
        (path / "manifest.json").write_text(json.dumps(described))
    else:
        with mock.patch.object(Path, "iterdir", lambda self: [self / "__0_0.distcp"]):
            do_damage(path, damage)
    with pytest.raises(DamagedCheckpoint, match=r"step-00000001"):
        read_checkpoint(path)
    read_checkpoint(written(tmp_path, 1))  # it is replaced


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = written(tmp_path, 2)
    with (
        mock.patch.object(os, "fsync", side_effect=OSError(errno.ENOSPC, "no space")),
        pytest.raises(OSError, match="no space"),
    ):
        written(tmp_path, 4)
    assert list(checkpoints_in(tmp_path)) == [2]
    read_checkpoint(path)


def chosen(root: str, resume: str | None) -> Any:
    """Runs on every rank."""
    found = checkpoints.choose(Path(root), resume)
    return None if found is None else (found[0].name, found[1]["step"])


def test_all_ranks_take_the_newest_complete_one(ranks: RankPools, tmp_path: Path) -> None:
    assert ranks(2).run(chosen, str(tmp_path), "auto") == [None, None]
    for step in (2, 4, 100_000_000):
        written(tmp_path, step)
    assert ranks(2).run(chosen, str(tmp_path), None) == [None, None]
    assert ranks(2).run(chosen, str(tmp_path), "auto") == [("step-100000000", 100_000_000)] * 2
    do_damage(folder_of(tmp_path, 100_000_000), "a file is cut off")
    assert ranks(2).run(chosen, str(tmp_path), "auto") == [("step-00000004", 4)] * 2


def remaining(root: str, keep: int) -> list[int]:
    """Runs on every rank: what is kept when step 6 is written, while 8 is there."""
    saver = checkpoints.Checkpoints(Path(root), keep, {})
    saver._remove_old(6)
    return list(checkpoints_in(Path(root)))


@pytest.mark.parametrize(("keep", "left"), [(1, [8, 6]), (2, [8, 6, 4]), (9, [8, 6, 4, 2])])
def test_old_checkpoints_go(ranks: RankPools, tmp_path: Path, keep: int, left: list[int]) -> None:
    """A later one is damaged, or it would have been continued from: it does not count."""
    for step in (2, 4, 6, 8):
        written(tmp_path, step)
    assert ranks(1).run(remaining, str(tmp_path), keep) == [left]


@pytest.mark.parametrize("damage", ["a file is cut off", "no manifest"])
def test_a_damaged_checkpoint_does_not_count(ranks: RankPools, tmp_path: Path, damage: str) -> None:
    """It is left where it is, and the last good one before it stays."""
    for step in (1, 2, 4, 6):
        written(tmp_path, step)
    do_damage(folder_of(tmp_path, 4), damage)
    assert ranks(1).run(remaining, str(tmp_path), 2) == [[6, 4, 2]]
