"""What tests of the scripts get."""

import shutil
from pathlib import Path

import pytest

from scripts.common import report


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of docs/, which `--write` changes instead."""
    copy = tmp_path / "docs"
    shutil.copytree(report.DOCS, copy, ignore=shutil.ignore_patterns("*.png"))
    monkeypatch.setattr(report, "DOCS", copy)
    return copy
