"""scripts/bench/timing.py: turns and medians, cells, options."""

import argparse

import pytest
import torch
from expecttest import assert_expected_inline
from ranks import RankPools

from scripts.bench import timing
from scripts.bench.timing import Timed
from scripts.common import report


def options(*words: str) -> argparse.Namespace:
    parser = report.make_parser("scripts.bench.some", "A benchmark.", "benchmarks.md", repeat=3)
    return report.start(parser, words)


def test_candidates_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], []

    def takes(name: str, *seconds: float) -> Timed:
        durations = iter(seconds)

        def run() -> None:
            order.append(name)
            now[0] += next(durations)

        def before() -> None:
            now[0] += 100  # the clock does not see it

        return Timed(run, before)

    monkeypatch.setitem(timing.CLOCKS, "wall", lambda: now[0])
    candidates = {"a": takes("a", 50, 1, 3, 2), "b": takes("b", 70, 6, 5, 7)}
    assert timing.medians(candidates, options()) == {"a": 2, "b": 6}
    assert "".join(order) == "abababab"
    candidates = {"a": takes("a", 9, 9, 9, 9, 9, 9, 1, 3, 2, 4, 3, 7)}
    assert timing.medians(candidates, options(), warm_up=3, calls=2) == {"a": 3}


def median_of_two(args: argparse.Namespace) -> dict[str, float]:
    rank = torch.distributed.get_rank()
    now = [0.0]
    # Rank 0 is slower in the first two turns, rank 1 in the third.
    durations = iter([0.0, *([5.0, 3.0, 1.0] if rank == 0 else [1.0, 2.0, 4.0])])

    def run() -> None:
        now[0] += next(durations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(timing.CLOCKS, "wall", lambda: now[0])
        return timing.medians({"a": Timed(run)}, args)


def test_the_slowest_rank_counts(ranks: RankPools) -> None:
    assert ranks(2).run(median_of_two, options()) == [{"a": 4.0}, {"a": 4.0}]


def test_verdicts() -> None:
    found = [timing.check_faster("here", 2.0, theirs, 2.5) for theirs in (5.0, 4.9, None)]
    assert_expected_inline(
        "\n".join(f"{check.holds}: {check.sentence}" for check in found),
        """\
True: here: 2.50x faster than torchao, at least 2.5
False: here: 2.45x faster than torchao, at least 2.5
False: here: torchao is installed""",
    )


def test_cells() -> None:
    seconds = (1.23456, 0.0456, 0.002347, 0.00010049, 0.0)
    assert [timing.milliseconds(s) for s in seconds] == ["1,235", "45.6", "2.35", "0.100", "0"]
    assert timing.ratio(3.0, 2.0) == "1.50x"
    assert timing.ratio(None, 2.0) == timing.ratio(3.0, None) == timing.milliseconds(None) == ""


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    args = options("--repeat", "5", "--write")
    assert args.command == "python -m scripts.bench.some --repeat 5 --write"
    assert torch.get_num_threads() == args.threads == 1
    for wrong in (("--repeat", "0"), ("--threads", "-1"), ("--device", "cuda", "--clock", "cpu")):
        with pytest.raises(SystemExit) as info:
            options(*wrong)
        assert info.value.code == 2
    assert "--clock cpu does not see" in capsys.readouterr().err
    assert timing.shape_type("16x32x4096") == (16, 32, 4096)
    for text in ("16x32", "16x32x40", "0x16x16"):
        with pytest.raises(argparse.ArgumentTypeError):
            timing.shape_type(text)
