"""scripts.measure.walk prints what docs/design.md says of calls."""

import re
import subprocess
import sys
from pathlib import Path

from scripts.measure.walk import WALKS

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| ([^|]+?) *\| *([\d,]+) \| *([\d,]+) \| *([\d,]+) \| *([\d,]+) \|$", re.M)


def table_of(text: str) -> dict[str, list[int]]:
    """The rows of a table of calls, by the first column."""
    return {name: [int(n.replace(",", "")) for n in counts] for name, *counts in ROW.findall(text)}


def test_calls_are_no_more_than_listed() -> None:
    """(Newer releases of Python and torch may need fewer.)"""
    listed = table_of((ROOT / "docs/design.md").read_text())
    assert list(listed) == list(WALKS)
    command = [sys.executable, "-m", "scripts.measure.walk"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    counted = table_of(ended.stdout)
    assert list(counted) == list(WALKS)
    for name, counts in counted.items():
        for most, count in zip(listed[name], counts, strict=True):
            assert 0.5 * most <= count <= most, (name, counts, listed[name])
