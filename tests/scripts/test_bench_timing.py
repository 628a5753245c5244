"""What the benchmark scripts share: turns and medians, tables, verdicts, pages."""

import argparse
import atexit
import json
import os
from pathlib import Path

import benchmarks
import pytest
import torch
from bench_ranks import run_on_ranks
from benchmarks import Check, Report, Timed
from expecttest import assert_expected_inline
from torch.multiprocessing import ProcessRaisedException


def options(*words: str) -> argparse.Namespace:
    return benchmarks.start(benchmarks.make_parser("A benchmark.", repeat=3), words)


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

    monkeypatch.setitem(benchmarks.CLOCKS, "wall", lambda: now[0])
    candidates = {"a": takes("a", 50, 1, 3, 2), "b": takes("b", 70, 6, 5, 7)}
    assert benchmarks.medians(candidates, options()) == {"a": 2, "b": 6}
    assert "".join(order) == "abababab"
    candidates = {"a": takes("a", 9, 9, 9, 9, 9, 9, 1, 3, 2, 4, 3, 7)}
    assert benchmarks.medians(candidates, options(), warm_up=3, calls=2) == {"a": 3}


def slowest_of_two(args: argparse.Namespace) -> dict[str, float]:
    rank = torch.distributed.get_rank()
    now = [0.0]
    # Rank 0 is slower in the first two turns, rank 1 in the third.
    durations = iter([0.0, *([5.0, 3.0, 1.0] if rank == 0 else [1.0, 2.0, 4.0])])

    def run() -> None:
        now[0] += next(durations)

    benchmarks.CLOCKS["wall"] = lambda: now[0]
    return benchmarks.medians({"a": Timed(run)}, args)


def test_the_slowest_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    args = options()
    assert run_on_ranks(2, args, slowest_of_two, args) == {"a": 4.0}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="2 ranks are needed"):
        run_on_ranks(2, args, slowest_of_two, args)


def aborts_at_its_end() -> int:
    atexit.register(os.abort)
    return 7


def test_a_rank_that_has_answered_ends_at_once() -> None:
    assert run_on_ranks(2, options(), aborts_at_its_end) == 7


def fails() -> None:
    raise ZeroDivisionError("on a rank")


def test_the_error_of_a_rank_is_told() -> None:
    with pytest.raises(ProcessRaisedException, match="ZeroDivisionError: on a rank"):
        run_on_ranks(1, options(), fails)


def test_cells() -> None:
    seconds = (1.23456, 0.0456, 0.002347, 0.00010049, 0.0)
    assert [benchmarks.milliseconds(s) for s in seconds] == ["1,235", "45.6", "2.35", "0.100", "0"]
    assert benchmarks.ratio(3.0, 2.0) == "1.50x"
    assert benchmarks.ratio(None, 2.0) == benchmarks.ratio(3.0, None) == ""
    lines = [["name", "torchao", "ms"], ["ours", "", "1.25"], ["bf16, longer", "", "3"]]
    assert_expected_inline(
        benchmarks.markdown(lines),
        """\
| name         | ms   |
| ------------ | ---- |
| ours         | 1.25 |
| bf16, longer | 3    |""",
    )


def test_sqnr() -> None:
    exact = torch.tensor([3.0, 4.0])
    assert benchmarks.sqnr(exact, exact) == float("inf")
    assert benchmarks.sqnr(exact, torch.tensor([3.0, 4.5])) == pytest.approx(20.0)


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    args = options("--repeat", "5", "--json", "figures.json", "--write")
    assert args.command.startswith("python scripts/")
    assert args.command.endswith(" --repeat 5 --write")
    assert options("--json=figures.json", "--write").command == args.command.replace(
        "--repeat 5 ", ""
    )
    assert torch.get_num_threads() == args.threads == 1
    for wrong in (("--repeat", "0"), ("--threads", "-1"), ("--device", "cuda", "--clock", "cpu")):
        with pytest.raises(SystemExit) as info:
            options(*wrong)
        assert info.value.code == 2
    assert "--clock cpu does not see" in capsys.readouterr().err
    assert benchmarks.shape_type("16x32x4096") == (16, 32, 4096)
    for text in ("16x32", "16x32x40", "0x16x16"):
        with pytest.raises(argparse.ArgumentTypeError):
            benchmarks.shape_type(text)


@pytest.mark.parametrize(
    ("asserted", "holds", "status"),
    [(None, False, 0), (False, False, 0), (True, True, 0), (True, False, 1), (2.5, False, 1)],
)
def test_verdicts(
    asserted: object,
    holds: bool,
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = options("--json", str(tmp_path / "figures.json"))
    args.asserted = asserted
    report = Report(tmp_path / "page.md", {"A section": "| table |"}, [{"ms": 1.5}])
    report.checks = [Check("first", True), Check("second", holds)]
    assert report.finish(args) == status
    printed = capsys.readouterr().out
    assert "A section\n\n| table |\n" in printed
    assert f"holds: first\n{'holds' if holds else 'BROKEN'}: second\n" in printed
    data = json.loads((tmp_path / "figures.json").read_text())
    assert data["rows"] == [{"ms": 1.5}]
    assert data["checks"][1] == {"sentence": "second", "holds": holds}
    assert f"torch {torch.__version__}" in data["machine"]
    assert not (tmp_path / "page.md").exists()  # nobody asked for it


def test_sections_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    benchmarks.update_page(page, {"B": "old", "C": "stays\n\n### with a part"})
    benchmarks.update_page(page, {"B": "new", "A": "first"})
    assert_expected_inline(
        page.read_text(),
        """\
<!-- Each section was written by the command that it names. -->

# Benchmarks

## A

first

## B

new

## C

stays

### with a part
""",
    )
