"""scripts/bench_step.py: its table, its page and its verdict, on steps that are too small to time."""

import json
from pathlib import Path

import bench_step
import pytest
from expecttest import assert_expected_inline

from fp8_dist import Float8LinearRecipeName


def test_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page, data = tmp_path / "benchmarks.md", tmp_path / "medians.json"
    page.write_text("# Benchmarks\n\n## Another\n\nstays\n")
    monkeypatch.setattr(bench_step, "PAGE", page)
    small = ["--batch-size", "1", "--seq-len", "16", "--repeat", "1"]
    options = [*small, "--json", str(data), "--write", "--assert", "1000000"]
    monkeypatch.setattr("sys.argv", ["bench_step.py", *options])
    assert bench_step.main() == 1  # nothing is as fast as that
    medians = json.loads(data.read_text())
    assert {"bf16", *(recipe.value for recipe in Float8LinearRecipeName)} <= set(medians)
    assert all(median > 0 for median in medians.values())
    text = page.read_text()
    assert "## Another\n\nstays" in text
    assert text.count("## A training step, eager") == 1
    assert bench_step.table(medians) in text


def test_the_table() -> None:
    medians = {"bf16": 10.0, "tensorwise": 20.0, "rowwise": 30.0}
    assert bench_step.speedup("tensorwise", medians) is None  # torchao is not installed
    medians |= {"torchao tensorwise": 50.0, "torchao rowwise": 15.0}
    assert_expected_inline(
        bench_step.table(medians),
        """\
| variant | ms | x bf16 | faster than torchao |
|---|---|---|---|
| bf16 | 10.0 | 1.00 |  |
| tensorwise | 20.0 | 2.00 | 2.50x |
| rowwise | 30.0 | 3.00 | 0.50x |
| torchao tensorwise | 50.0 | 5.00 |  |
| torchao rowwise | 15.0 | 1.50 |  |""",
    )
