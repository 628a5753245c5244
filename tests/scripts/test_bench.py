"""The benchmarks: real runs at their smallest sizes, what they count, and what they refuse."""

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from torch_releases import rows_in_torchs_gemm

from scripts.bench import gpu, gpu_counts, linear, matmul, precompute, stats, step, timing
from scripts.bench.layers import layer_of
from scripts.bench.timing import TOLERANCE_DB, Timed
from scripts.common import models, report
from scripts.common.candidates import BF16, OURS, TORCHAO
from scripts.common.fake_cuda.counter import Counts, Kernel
from scripts.common.fake_cuda.dispatch import Dispatched
from scripts.common.fake_cuda.process import FakeCudaProcess
from scripts.common.fake_cuda.roofline import Rates, milliseconds
from scripts.common.gemms import GEMMS, float8_gemms
from scripts.common.llama import MODELS

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (16, 32, 48)
SMALL = ["--batch-size", "2", "--seq-len", "16", "--repeat", "1"]
ONCE = Namespace(device="cpu", repeat=1, clock="wall")


def options(*words: str) -> argparse.Namespace:
    return report.start(report.make_parser("scripts.bench.some", None, repeat=3), words)


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


def test_a_target_fails_without_torchao() -> None:
    found = [timing.check_faster("here", 2.0, theirs, 2.5).holds for theirs in (5.0, 4.9, None)]
    assert found == [True, False, False]


def test_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert linear.main(["--shapes", "16x32x48", "--repeat", "1"]) == 0
    printed = capsys.readouterr().out
    for name in (BF16, *OURS, *TORCHAO):
        assert re.search(rf"^\| {name} +\|", printed, re.MULTILINE), name
    assert "NO" not in printed  # operands are torchao's


def test_layers_are_as_close_as_torchaos() -> None:
    known = {row.name: row for row in linear.measure(SHAPE, ONCE)}
    for theirs in TORCHAO:
        for gemm, decibels in known[theirs].decibels.items():
            ahead = known[theirs.removeprefix("torchao ")].decibels[gemm] - decibels
            assert ahead >= -TOLERANCE_DB, (theirs, gemm)


def test_missed_targets_of_layers_fail() -> None:
    rows = {
        (shape, name): linear.Row(name, shape, step, None, dict.fromkeys(GEMMS, 55.0), True)
        for shape in (linear.SPEED, linear.OVERHEAD)
        for name, step in ((BF16, 1), ("tensorwise", 2), ("torchao tensorwise", 6))
    }
    assert all(check.holds for check in linear.checks(list(rows.values())))
    for key, change in (
        ((linear.SPEED, "tensorwise"), {"step": 2.6}),
        ((linear.SPEED, "tensorwise"), {"same_operands": False}),
        ((linear.SPEED, "tensorwise"), {"decibels": dict.fromkeys(GEMMS, 54.9)}),
        ((linear.OVERHEAD, "torchao tensorwise"), {"step": 3.9}),
    ):
        changed = rows | {key: dataclasses.replace(rows[key], **change)}  # type: ignore[arg-type]
        assert not all(check.holds for check in linear.checks(list(changed.values()))), change


@pytest.mark.skipif(not TORCHAO, reason="torchao is not installed")
def test_other_operands_are_noticed() -> None:
    theirs = float8_gemms("torchao tensorwise", layer_of("torchao tensorwise", SHAPE, "cpu").run)
    ours = float8_gemms("tensorwise", layer_of("tensorwise", SHAPE, "cpu").run)
    for gemm in GEMMS:
        assert ours[gemm].same_as(theirs[gemm])
        for field, change in (("a", 1), ("b", 1), ("scale_a", 2**-30), ("scale_b", 2**-30)):
            copy = getattr(theirs[gemm], field).clone()
            plain = copy.view(torch.uint8) if copy.element_size() == 1 else copy
            plain[(0,) * plain.ndim] += change
            other = dataclasses.replace(theirs[gemm], **{field: copy})
            assert not ours[gemm].same_as(other), (gemm, field)


@pytest.mark.parametrize("recipe", matmul.RECIPES)
def test_products_are_as_close_as_torchs(recipe: str) -> None:
    with rows_in_torchs_gemm(recipe):
        for row in matmul.measure((32, 48, 16), recipe, ONCE):
            assert row.decibels[matmul.OURS] > 45
            for name in row.decibels:
                assert row.decibels[matmul.OURS] >= row.decibels[name] - TOLERANCE_DB


def test_slow_products_fail() -> None:
    seconds = {"fp8_dist": 1.0, "torch._scaled_mm": 2.0, "torchao": 3.0}
    decibels = {"fp8_dist": 54.99, "torch._scaled_mm": 55.0}
    row = matmul.Row((16, 32, 64), "rowwise", "output", seconds, decibels)
    assert [check.holds for check in matmul.checks([row])] == [True, True, True]
    slow = dataclasses.replace(row, seconds=seconds | {"fp8_dist": 2.1})
    assert [check.holds for check in matmul.checks([row, slow])] == [False, True, True]
    far = dataclasses.replace(row, decibels=decibels | {"fp8_dist": 54.9})
    assert [check.holds for check in matmul.checks([row, far])] == [True, True, False]


def test_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main([*SMALL, "--assert", "1000000"]) == 1
    printed = capsys.readouterr().out
    assert all(re.search(rf"^\| {name} ", printed, re.M) for name in (BF16, *OURS, *TORCHAO))
    assert "BROKEN" in printed


def test_steps_on_a_mesh(ranks: RankPools) -> None:
    names = [BF16, "delayed", *TORCHAO[:1]]
    for mesh in ({"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}):
        first, second = ranks(2).run(step.measure, names, step.parse(SMALL), mesh)
        assert first == second  # the slowest rank's, on both
        assert list(first["debug"]) == names


def test_steps_train() -> None:
    """The next step begins with what follows this one, and uses its weights."""
    args = step.parse(SMALL)
    batch = torch.randint(256, (2, 2, 16))
    model = models.build("tensorwise", MODELS["debug"])
    with pytest.MonkeyPatch.context() as patch:
        calls: list[torch.nn.Module] = []
        patch.setattr(step, "build", lambda *args, **options: model)
        patch.setattr(step, "after_step", lambda name, sharded: calls.append)
        _, run = step.step_of("tensorwise", MODELS["debug"], None, args, (batch[0], batch[1]))
    weight = model.layers[0].attention.wq.weight
    before = weight.detach().clone()
    for count in (1, 2):
        run()
        assert calls == [model] * count
        assert weight.grad is None
    assert not torch.equal(weight, before)


def test_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--recipes", "tensorwise", "--assert", "0.01"]
    assert stats.main(words) == 1
    assert "| tensorwise |" in capsys.readouterr().out


def test_precompute(ranks: RankPools) -> None:
    args = Namespace(layers=2, size=32, **vars(ONCE))
    first, second = ranks(2).run(precompute.measure, args)
    assert first == second  # the slowest rank's, on both
    assert list(first) == (["fp8_dist", "torchao"] if TORCHAO else ["fp8_dist"])


@pytest.mark.parametrize(
    ("run", "words", "message"),
    [
        (linear.main, ["--assert", "--shapes", "16x16x16"], "--shapes must have both"),
        (linear.main, ["--shapes", "16x40x16"], "positive multiples of 16"),
        (step.main, ["--mesh", "pp=2"], "'pp=2' is not dp=SIZE or tp=SIZE"),
        (step.main, ["--mesh", "tp=2", "--compile"], "--compile is for --mesh none"),
        (step.main, ["--device", "cuda", "--clock", "cpu"], "--clock cpu does not see"),
        (gpu.main, [], "there is no CUDA device"),
    ],
)
def test_options(
    run: Any,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as info:
        run(words)
    assert info.value.code == 2
    assert message in capsys.readouterr().err


def seconds_of(work: gpu.Work) -> float:
    """In place of a GPU's events."""
    begin = time.perf_counter()
    work.before()
    work.run()
    return time.perf_counter() - begin


def test_blocks_of_every_candidate() -> None:
    make = partial(gpu.block_work, MODELS["debug"], 32, "cpu")
    eager = gpu.variants([False])
    found = gpu.compare(make, eager, 10, 1, seconds_of)
    assert [(r.name, r.compiled) for r in found] == eager
    sizes = MODELS["debug"]
    d, kv, ffn = sizes.dim, sizes.n_kv_heads * sizes.head_dim, sizes.ffn_dim
    assert {r.flops for r in found} == {6 * 32 * (2 * d * d + 2 * d * kv + 3 * d * ffn)}
    late = gpu.compare(make, eager, 0, 1, seconds_of)
    assert [r.name for r in late] == ["bf16"]
    assert "tensorwise" in gpu.left_out(late)
    assert gpu.results_table(found).count("\n") == len(found) + 1


def steps() -> list[gpu.Result]:
    make = partial(gpu.step_work, MODELS["debug"], 16, "cpu")
    candidates = gpu.variants([False])[:2]
    return gpu.compare(make, candidates, 10, 1, seconds_of)


def test_steps_of_several_gpus(ranks: RankPools) -> None:
    first, second = ranks(2).run(steps)
    assert first == second  # the slowest rank's, on both
    assert all(r.tokens == 32 and r.seconds > 0 for r in first)


def test_the_day_with_a_gpu_needs_one(tmp_path: Path) -> None:
    environment = os.environ | {"PY": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(ROOT / "scripts/gpu_day.sh")]
    for words, status, message in (
        ([], 2, "usage: "),
        ([str(tmp_path / "day")], 1, "finds no CUDA device: install torch for CUDA"),
    ):
        done = subprocess.run(command + words, env=environment, capture_output=True, text=True)
        assert done.returncode == status
        assert message in done.stderr


GEMM = Kernel("_scaled_mm", "gemm", 1, 10**9, 10**9, 12 * 10**11, "float8")
COUNTS = Counts([GEMM, Kernel("add", "tiny", 4, 100, 100)])


def test_times_of_a_roofline() -> None:
    assert milliseconds(COUNTS, Rates()) == pytest.approx({"gemm": 1.0, "tiny": 0.01})
    faster = Rates(float8=2400.0, launch=5.0)
    assert milliseconds(COUNTS, faster) == pytest.approx({"gemm": 0.5, "tiny": 0.02})


def test_counts_of_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tables. (What is counted is tested in tests/fake_cuda.)"""

    def answer(self: FakeCudaProcess, function: Any, *args: Any) -> Any:
        if function is gpu_counts.seconds_to_dispatch:
            return dict.fromkeys(args[0], Dispatched(40e-6, None))
        return COUNTS

    monkeypatch.setattr(FakeCudaProcess, "run", answer)
    assert gpu_counts.main(["--turns", "3"]) == 0
    for table in capsys.readouterr().out.split("gpu ")[1:]:
        assert f"| {BF16} " in table
        assert "| tensorwise " in table
