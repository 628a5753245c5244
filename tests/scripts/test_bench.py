"""The benchmarks: real runs with the smallest sizes, and the arithmetic of timings."""

import argparse
import re

import pytest
import torch
from ranks import RankPools

from scripts.bench import against, linear, step, step_run, timing
from scripts.bench.timing import Timed
from scripts.common import report
from scripts.common.candidates import TORCHAO
from scripts.common.llama import MODELS
from scripts.common.recipes import BF16

NAMES = [BF16, "tensorwise", "delayed"]
SMALL = ["--batch-size", "2", "--seq-len", "16", "--repeat", "1", "--candidates", *NAMES]
SMALL += ["--device", "cpu"]


def options(*words: str) -> argparse.Namespace:
    return report.parse(report.make_parser("scripts.bench.some", None, repeat=3), words)


def test_candidates_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], []

    def takes(name: str, *seconds: float) -> Timed:
        durations = iter(seconds)

        def run() -> None:
            order.append(name)
            now[0] += next(durations)

        def before() -> None:
            now[0] += 100  # not timed

        return Timed(run, before)

    monkeypatch.setitem(timing.CLOCKS, "wall", lambda: now[0])
    candidates = {"a": takes("a", 50, 1, 3, 2), "b": takes("b", 70, 6, 5, 7)}
    assert timing.medians(candidates, options()) == {"a": 2, "b": 6}
    assert "".join(order) == "abbaabba"  # no candidate always follows the same one
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


def test_tables_and_targets(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"bf16": 0.001, "tensorwise": 0.002, "tensorwise, recorded": 0.003}
    args = report.make_parser("scripts.bench.some", None, repeat=1, ratio=True).parse_args(
        ["--assert", "2.5"]
    )
    args.command = "some"
    for theirs, status in ((0.005, 0), (0.0049, 1), (None, 1)):
        found = seconds | ({} if theirs is None else {"torchao tensorwise": theirs})
        assert timing.finish(args, {"here": found}) == status
    printed = capsys.readouterr().out
    assert "| tensorwise           | 2.00 |  2.00x |               2.50x |" in printed
    assert "| tensorwise, recorded | 3.00 |  3.00x |                     |" in printed
    assert " 1.50x |" in printed


def test_layers(capsys: pytest.CaptureFixture[str]) -> None:
    names = [*NAMES, *TORCHAO[:1]]
    assert linear.main(["--shapes", "16x32x48", "--repeat", "1", "--candidates", *names]) == 0
    printed = capsys.readouterr().out
    for name in names:
        assert re.search(rf"^\| {name} +\|", printed, re.MULTILINE), name


def test_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main([*SMALL, "--stats", "--assert", "1000000"]) == 1
    printed = capsys.readouterr().out
    for name in (*NAMES, "tensorwise, with GEMMs"):
        assert re.search(rf"^\| {name} ", printed, re.MULTILINE), name
    assert "BROKEN" in printed


def test_steps_on_a_mesh(ranks: RankPools) -> None:
    args = step.parse_args(SMALL)
    first, second = ranks(2).run(step_run.measure, args, {"dp": 1, "tp": 2})
    assert first == second  # the slowest rank's, on both
    assert list(first["debug"]) == NAMES


def test_steps_train() -> None:
    """The update of scales follows each step, and the next step uses the new weights."""
    batch = torch.randint(256, (2, 2, 16))
    with pytest.MonkeyPatch.context() as patch:
        calls: list[torch.nn.Module] = []
        patch.setattr(step_run, "after_step", lambda name, sharded: calls.append)
        sizes, options = MODELS["debug"], step.parse_args(SMALL)
        model, run = step_run.step_of("tensorwise", sizes, None, options, (batch[0], batch[1]))
    weight = model.layers[0].attention.wq.weight
    before = weight.detach().clone()
    for count in (1, 2):
        run()
        assert calls == [model] * count
        assert weight.grad is None
    assert not torch.equal(weight, before)


PRINTED = """\
`python -m scripts.bench.linear` on a CPU

linear 16 x 16 x 16

| candidate  |    ms | x bf16 |
| ---------- | ----: | -----: |
| bf16       | 0.040 |  1.00x |
| tensorwise | 1,200 | 30000x |
"""


def test_readings_of_what_another_commit_prints() -> None:
    title = "linear 16 x 16 x 16"
    expected = {f"{title}: bf16": 0.04, f"{title}: tensorwise": 1200.0}
    assert dict(against.readings(PRINTED)) == expected
