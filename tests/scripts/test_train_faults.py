"""Runs whose ranks die, are late, or stop: who says it, and that torchrun's restarts continue."""

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import run

from scripts.common.ranks import LOOPBACK
from scripts.train import fault_test, roll
from scripts.train.faulty import Fault
from scripts.train.manifest import checkpoints_in
from scripts.train.roll import MissingRank, Roll

ROOT = Path(fault_test.__file__).parents[2]
LOST = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:123")


def explained(
    errors: list[BaseException | None], *, steps: list[int], store: dist.Store | None = None
) -> list[str | None]:
    """What each rank says of its error; ranks without one are dead."""
    store = dist.HashStore() if store is None else store
    rolls = [Roll(store, rank, len(errors)) for rank in range(len(errors))]
    for each, step in zip(rolls, steps, strict=True):
        each.at_step(step)
    with ThreadPoolExecutor(len(errors)) as threads:
        futures = [
            threads.submit(each.explain, error) if error is not None else None
            for each, error in zip(rolls, errors, strict=True)
        ]
        return [future.result() if future is not None else None for future in futures]


def test_a_dead_rank_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll, "GRACE_S", 0.3)
    assert explained([None, LOST, LOST], steps=[7, 8, 8]) == [
        None,
        "rank 0 of 3 died or hangs: no answer since step 7",
        "",
    ]
    assert explained([LOST, None, None], steps=[3, 3, 3])[0] == (
        "ranks 1, 2 of 3 died or hangs: no answer since step 3"
    )


def test_a_rank_with_an_error_of_its_own_is_named_with_it() -> None:
    said = explained([LOST, ValueError("bad\nvalue"), LOST], steps=[3, 3, 3])
    assert said == ["rank 1 of 3 failed: ValueError: bad", None, ""]


def test_a_late_rank_is_named_once() -> None:
    store = dist.HashStore()

    def called(rank: int) -> str:
        with pytest.raises(MissingRank) as error:
            Roll(store, rank, 4).call(0.3)
        return str(error.value)

    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(called, [1, 2]))
    assert said == [
        "ranks 0, 3 of 4 did not start within 0.3 s: look at the log of ranks 0, 3, or give a "
        "longer --timeout",
        "",
    ]


def test_a_killed_rank_under_torchrun(tmp_path: Path) -> None:
    """torchrun starts the ranks again, and they continue from the last complete checkpoint.

    On 2 x 2 ranks rank 0 waits for ranks 1 and 2, which lose their connections to rank 3. It loses
    its own when they end, and is not at fault.
    """
    out = tmp_path / "out"
    fault = Fault(signal="SIGKILL", point="gather", rank=3, step=4)
    finished = run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
            *("4", "--max-restarts", "1", "-m", "scripts.train.faulty", "--steps", "4"),
            *("--dp", "2", "--tp", "2"),
            *("--batch-size", "2", "--seq-len", "16", "--data", str(ROOT / "docs")),
            *("--recipe", "delayed", "--checkpoint-every", "1", "--resume", "auto"),
            *("--keep", "1", "--out", str(out), "--timeout", "60"),
        ],
        env=dict(
            os.environ,
            FAULT=json.dumps(asdict(fault)),
            FAULT_RECORD=str(tmp_path / "fault"),
            GLOO_SOCKET_IFNAME=LOOPBACK,
            CUDA_VISIBLE_DEVICES="",
            PYTHONPATH=str(ROOT),
        ),
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr
    said = re.findall(r"ranks? [\d, ]+ of 4 .*", finished.stderr)
    assert said == ["rank 3 of 4 died or hangs: no answer since step 4"]
    assert "checkpoint: continues from" in finished.stdout
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert list(checkpoints_in(out / "checkpoints")) == [4]


def test_the_fault_test_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--kills", "4", "--faults", "killed while writing", "SIGTERM"]
    status = fault_test.main([*options, "--out", str(tmp_path), "--recipes", "tensorwise"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "holds: 2 of 2 runs survived" in printed
    assert "| SIGTERM " in printed


def test_the_fault_test_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is not continued has not survived."""

    def restart_nothing(run: fault_test.Run, *args: object, **more: object) -> int:
        (run.folder / "metrics.jsonl").write_text("" if run.folder.name == "00" else "{")
        return int(run.folder.name == "00")

    monkeypatch.setattr(fault_test.Run, "train", restart_nothing)
    monkeypatch.setattr(fault_test.Run, "metrics", lambda run: [(1, run.folder.name)])
    options = ["--kills", "4", "--faults", "killed while writing", "--out", str(tmp_path)]
    assert fault_test.main(options) == 1
    assert "BROKEN: 0 of 1 runs survived" in capsys.readouterr().out
