"""scripts/bench_precompute.py: a run on ranks, its table, its page and its verdict."""

import argparse
import json
from pathlib import Path
from typing import Any

import bench_precompute
import benchmarks
import pytest
from bench_peers import TORCHAO
from expecttest import assert_expected_inline
from ranks import RankPools

SECONDS = {"fp8_dist": 0.008, "torchao": 0.034}


def options(*words: str) -> argparse.Namespace:
    args = benchmarks.start(benchmarks.make_parser("A benchmark.", repeat=1), words)
    args.layers, args.size = 2, 32
    return args


def test_on_ranks(ranks: RankPools) -> None:
    first, second = ranks(2).run(bench_precompute.measure, options())
    assert first == second  # the slowest rank's, on both
    assert list(first) == ["fp8_dist", "torchao"] if TORCHAO else ["fp8_dist"]
    assert all(seconds > 0 for seconds in first.values())


@pytest.mark.parametrize(("least", "status"), [("4", 0), ("4.5", 1), (None, 0)])
def test_main(
    least: str | None, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def run_on_ranks(world_size: int, *arguments: Any) -> dict[str, float]:
        asked.append(world_size)
        return SECONDS

    page, data = tmp_path / "benchmarks.md", tmp_path / "figures.json"
    monkeypatch.setattr(bench_precompute, "run_on_ranks", run_on_ranks)
    monkeypatch.setattr(bench_precompute, "PAGE", page)
    words = ["--ranks", "3", "--layers", "7", "--json", str(data), "--write"]
    words += [] if least is None else ["--assert", least]
    assert bench_precompute.main(words) == status
    assert asked == [3]
    (row,) = json.loads(data.read_text())["rows"]
    assert row == {"layers": 7, "size": 512, "ranks": 3, "seconds": SECONDS}
    text = page.read_text()
    assert "## Precompute\n" in text
    assert "7 weights of 512 x 512 on 3 ranks" in text
    assert bench_precompute.table(SECONDS) in text


def test_the_table_and_its_checks() -> None:
    assert_expected_inline(
        bench_precompute.table(SECONDS),
        """\
| library  | ms   | x fp8_dist |
| -------- | ---- | ---------- |
| fp8_dist | 8.00 | 1.00x      |
| torchao  | 34.0 | 4.25x      |""",
    )
    (check,) = bench_precompute.checks(SECONDS, 4)
    assert_expected_inline(check.sentence, """4.25x faster than torchao, at least 4""")
    assert check.holds
    ours = {"fp8_dist": 0.008}
    assert [c.holds for c in bench_precompute.checks(ours, 4)] == [False]
    assert bench_precompute.checks(ours, None) == []


def test_other_ranks_of_a_torchrun_say_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_precompute, "run_on_ranks", lambda *arguments: None)
    assert bench_precompute.main(["--assert", "4"]) == 0
    assert capsys.readouterr().out == ""
