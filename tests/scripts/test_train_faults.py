"""Runs whose ranks die, are late, or stop: who says it, and that torchrun's restarts continue."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from scripts.train import fault_test, roll
from scripts.train.roll import MissingRank, Roll

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:123")


def explained(errors: list[BaseException | None], steps: list[int]) -> list[str | None]:
    """What each rank says of its error; ranks without one are dead."""
    store = dist.HashStore()
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
    assert explained([None, LOST, LOST], [7, 8, 8]) == [
        None,
        "rank 0 of 3 died or hangs: no answer since step 7",
        "",
    ]
    assert explained([LOST, None, None], [3, 3, 3])[0] == (
        "ranks 1, 2 of 3 died or hangs: no answer since step 3"
    )


def test_a_rank_with_an_error_of_its_own_is_named_with_it() -> None:
    said = explained([LOST, ValueError("bad\nvalue"), LOST], [3, 3, 3])
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


def test_the_fault_test_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """(The damage is tested in test_train_checkpoints.py.)"""
    faults = ["killed in a gather", "SIGTERM"]
    options = ["--kills", "4", "--recipes", "delayed", "--out", str(tmp_path)]
    status = fault_test.main([*options, "--faults", *faults])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "holds: 2 of 2 runs survived" in printed
    assert all(f"| {fault} " in printed for fault in faults)


def test_the_fault_test_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is not continued has not survived."""
    monkeypatch.setattr(
        fault_test.Run,
        "train",
        lambda run, *_, **__: "" if "ref" in run.folder.name else "status 1",
    )
    monkeypatch.setattr(fault_test.Run, "metrics", lambda run: [])
    options = ["--kills", "4", "--faults", "killed while writing", "--out", str(tmp_path)]
    assert fault_test.main(options) == 1
    assert "BROKEN: 0 of 1 runs survived" in capsys.readouterr().out
