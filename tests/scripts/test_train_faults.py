"""Runs whose ranks die, hang, or stop: torchrun's restarts continue them, bit for bit."""

from pathlib import Path

import pytest

from scripts.train import fault_test


def test_the_fault_test_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """(The damage is tested in test_train_checkpoints.py.)"""
    faults = ["killed in a gather", "killed while writing", "SIGTERM", "a full disk", "a late rank"]
    options = ["--kills", "4", "--recipes", "delayed", "--out", str(tmp_path)]
    status = fault_test.main([*options, "--faults", *faults])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "holds: 6 of 6 runs survived" in printed
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
