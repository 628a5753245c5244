"""scripts/bench/precompute.py: a run on ranks, its block and its verdict."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline
from ranks import RankPools

from scripts.bench import precompute
from scripts.common.blocks import read_block
from scripts.common.candidates import TORCHAO

SECONDS = {"fp8_dist": 0.008, "torchao": 0.034}


def test_on_ranks(ranks: RankPools) -> None:
    args = Namespace(layers=2, size=32, device="cpu", repeat=1, clock="wall")
    first, second = ranks(2).run(precompute.measure, args)
    assert first == second  # the slowest rank's, on both
    assert list(first) == (["fp8_dist", "torchao"] if TORCHAO else ["fp8_dist"])
    assert all(seconds > 0 for seconds in first.values())


@pytest.mark.parametrize(("least", "status"), [("4", 0), ("4.5", 1), (None, 0)])
def test_main(
    least: str | None, status: int, monkeypatch: pytest.MonkeyPatch, documents: Path
) -> None:
    asked: list[Any] = []

    def run_on_ranks(world_size: int, *arguments: Any, **options: Any) -> list[dict[str, float]]:
        asked.append(world_size)
        return [SECONDS] * world_size

    monkeypatch.setattr(precompute, "run_on_ranks", run_on_ranks)
    words = ["--ranks", "3", "--layers", "7", "--write"]
    words += [] if least is None else ["--assert", least]
    assert precompute.main(words) == status
    assert asked == [3]
    assert_expected_inline(
        read_block(documents / "benchmarks.md", "precompute").partition("\n\n")[2],
        """\
| library  |   ms | x fp8_dist |
| -------- | ---: | ---------: |
| fp8_dist | 8.00 |      1.00x |
| torchao  | 34.0 |      4.25x |""",
    )
