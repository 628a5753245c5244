"""The day with a GPU: that no stage stops another, and what is made of their results."""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from scripts.bench import gpu, gpu_results, gpu_smoke, gpu_tests
from scripts.bench.gpu_day import CALLS, SECONDS, Day, Group, Stage
from scripts.bench.gpu_results import BEHIND, FAILED, Result, add_options, append, read, run

ROOT = Path(__file__).resolve().parents[2]
# An interpreter that finds a GPU, and whose stages append a line.
PYTHON = f"""#!{sys.executable}
import json, os, sys
if sys.argv[2] == "scripts.bench.gpu_day":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:], "--python", sys.argv[0]])
if sys.argv[1] == "-m":
    given = dict(zip(sys.argv[3:], sys.argv[4:]))
    with open(given["--results"], "a") as file:
        print(json.dumps({{"stage": given["--stage"], "name": "case", "readings": []}}), file=file)
"""
FAULTS = """
import argparse, os, sys, time
from scripts.bench import gpu_results

def fails():
    raise ValueError("planted")

def poisons():
    gpu_results._synchronize = fails
    fails()

parser = argparse.ArgumentParser()
gpu_results.add_options(parser, "")
cases = {"first": gpu_results.Result, "fails": fails, "poisons": poisons}
cases |= {"dies": lambda: os._exit(9), "hangs": lambda: time.sleep(1000), "last": gpu_results.Result}
sys.exit(gpu_results.run(parser.parse_args(), cases.items()))
"""


def test_faults_leave_every_other_line(tmp_path: Path) -> None:
    """A case raises, one leaves a device that answers no more, one ends its process, one hangs."""
    group = Group(300, (Stage("faults", ("-c", FAULTS), patience=20),))
    Day(sys.executable, tmp_path, tmp_path).run([group], time.monotonic(), 300)
    found = {result.name: result.error for result in read(tmp_path / "results.jsonl")}
    assert found.pop("hangs").startswith("stopped after 2")
    assert found == {
        "first": "",
        "fails": "ValueError: planted",
        "poisons": "ValueError: planted",
        "dies": "ended with status 9",
        "last": "",
    }
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    assert left == []


def test_a_call(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    done = subprocess.run(
        [
            "bash",
            str(ROOT / "scripts/gpu_day.sh"),
            "A",
            str(tmp_path / "found"),
            "--seconds",
            "3000",
        ],
        env=os.environ | {"PY": str(python), "GPU_PACK": str(tmp_path / "no pack")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    stages = [stage.name for group in CALLS["A"] for stage in group.stages]
    assert [line.split(": ")[0] for line in done.stdout.splitlines()[:-1]] == stages
    assert {r.stage for r in read(tmp_path / "found/results.jsonl")} == {*stages}
    with tarfile.open(tmp_path / "found/log_A.tgz") as archive:
        assert "logs_A/kernels_1.log" in archive.getnames()


def test_a_stage_that_can_not_start_is_an_error(tmp_path: Path) -> None:
    """Python's own status is that of no stage."""
    stages = tuple(
        Stage(name, ("-c", program))
        for name, program in (("import", "import nosuchmodule"), ("status", "raise SystemExit(3)"))
    )
    Day(sys.executable, tmp_path, tmp_path).run([Group(60, stages)], time.monotonic(), 60)
    (result,) = read(tmp_path / "results.jsonl")
    assert (result.stage, result.name, result.error) == ("import", "start", "ended with status 1")


def test_cases_that_can_not_be_made_are_an_error(tmp_path: Path) -> None:
    """It is written whatever cases were chosen."""

    def cases() -> Iterator[tuple[str, Callable[[], Result]]]:
        yield "first", Result
        raise RuntimeError("no more")

    parser, path = argparse.ArgumentParser(), tmp_path / "results.jsonl"
    add_options(parser, "stage")
    args = parser.parse_args(["--results", str(path), "--only", "first"])
    assert run(args, cases()) == FAILED
    found = [(r.name, r.error) for r in read(path)]
    assert found == [("first", ""), (BEHIND, "RuntimeError: no more")]


def test_a_line_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    """Its writer was stopped; others go on."""
    path = tmp_path / "results.jsonl"
    append(path, Result("a", "1"))
    with path.open("a") as file:
        file.write('{"stage": "cut o')
    append(path, Result("b", "2"))
    assert [r.stage for r in read(path)] == ["a", "b"]


def test_a_group_ends_at_its_time_and_what_it_found_is_kept(tmp_path: Path) -> None:
    """The others of its group, and those behind it, have theirs."""
    program = "import sys, time; print(sys.argv); time.sleep(float(sys.argv[1]))"
    slow, quick, last = (
        Stage(n, ("-c", program, s)) for n, s in (("slow", "99"), ("quick", "0"), ("last", "0"))
    )
    begin = time.monotonic()
    groups = [Group(6, (slow, quick)), Group(60, (last,))]  # time to start, on a busy machine
    Day(sys.executable, tmp_path, tmp_path).run(groups, begin, 60)
    assert time.monotonic() - begin < 60
    (result,) = read(tmp_path / "results.jsonl")
    assert (result.stage, result.error) == ("slow", "stopped at the end of its time")
    assert "slow" in (tmp_path / "slow.log").read_text()
    assert "last" in (tmp_path / "last.log").read_text()


@pytest.mark.parametrize("call", CALLS)
def test_a_call_fits_its_time(call: str) -> None:
    assert sum(group.seconds for group in CALLS[call]) <= SECONDS[call] - 4  # of starting
    names = [stage.name for group in CALLS[call] for stage in group.stages]
    assert len({*names}) == len(names)


def test_programs_take_the_words_of_their_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu_results, "run", lambda args, cases: started.append(args.stage))
    monkeypatch.setattr(pytest, "main", lambda options, plugins: 0)
    stages = [stage for call in CALLS.values() for group in call for stage in group.stages]
    for stage in stages:
        main = {"gpu": gpu, "gpu_smoke": gpu_smoke, "gpu_tests": gpu_tests}
        main[stage.words[1].rpartition(".")[2]].main([*stage.words[2:], "--stage", stage.name])
    assert started == [stage.name for stage in stages if "gpu_tests" not in stage.words[1]]


def test_there_must_be_a_gpu_and_such_a_call(tmp_path: Path) -> None:
    script = str(ROOT / "scripts/gpu_day.sh")
    own = {"PY": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    for words, status, message in (
        ([], 2, "usage: "),
        (["D", str(tmp_path)], 2, "usage: "),
        (["A", str(tmp_path)], 1, "finds no CUDA device: install torch for CUDA"),
    ):
        done = subprocess.run(
            ["bash", script, *words],
            env=os.environ | own,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status
        assert message in done.stderr


def test_a_page_of_canned_results(tmp_path: Path) -> None:
    """Medians of all turns, the baseline again, shares of the copy, and what is derived beside."""
    path, shape = tmp_path / "results.jsonl", "8192 x 4096 x 14336"
    ident = {"card": "NVIDIA H100", "commit": "abc"}
    of_layer = {"shape": shape, "tokens": 8192, "flops": 2.9e12, **ident}
    lines = [
        Result("start", "versions", note="NVIDIA H100, torch 2.11.0", **ident),
        Result("kernels 1", "amax, odd, choice 0", **ident),
        Result("kernels 2", "quantize, odd, choice 1", error="AssertionError: 3 differ", **ident),
        Result("kernels 2", "quantize, odd, choice 1", note="mended", **ident),
        Result("tests", "test_gemms", error="RuntimeError: refused", **ident),
        Result("rates", "copy", readings=(1e-3, 2e-3, 3e-3), bytes=6 * 10**9, **ident),
        Result("kernel rates", "tensorwise", "tensorwise", note="_cast BM=64 2 us", **ident),
        Result("layers", f"{shape}, bf16, turn 1", "bf16", readings=(4e-3, 5e-3), **of_layer),
        Result("layers", f"{shape}, bf16, turn 2", "bf16", readings=(9e-3,), **of_layer),
        Result("layers", f"{shape}, bf16, again, turn 1", "bf16", readings=(6e-3,), **of_layer),
        Result("layers", f"{shape}, tensorwise compiled, turn 1", "tensorwise", True, readings=(2.5e-3,), peak=10**9, **of_layer),
        Result("layers", f"{shape}, bf16, wall", "bf16", readings=(7e-3,), **of_layer),
        Result("blocks", "bf16, step", "bf16", shape="8 blocks", readings=(0.3,), tokens=8192, **ident),
        Result("blocks", "bf16, optimizer", "bf16", shape="8 blocks", readings=(0.1,), tokens=8192, **ident),
        Result("training", "bf16", "bf16", shape="1b", readings=(0.5,), tokens=4096, note="loss 3.2", **ident),
    ]  # fmt: skip
    for line in lines:
        append(path, line)
    with path.open("a") as file:
        file.write('{"stage": "cut o')
    page = report(path)
    for row in (
        r"Card: NVIDIA H100. Commit: abc.",
        r"- NVIDIA H100, torch 2.11.0",
        r"| kernels 2 | 1 | 0 |",
        r"- tests: test_gemms: RuntimeError: refused",
        r"| copy | 3.00 TB/s | 4 TB/s | 1.000 to 3.000 |",
        r"- tensorwise: _cast BM=64 2 us",
        r"| bf16 | 5.000 | 4.000 to 9.000 | 3.65 | 1.00 | 1,638,400 | 580 | |",
        r"| bf16, again | 6.000 | 6.000 to 6.000 | | 0.83 |",
        r"| tensorwise, compiled | 2.500 | 2.500 to 2.500 | 2.6",
        r"| bf16 | 300.000 | 300.000 to 300.000 | 100.000 | 100.000 to 100.000 | 20,480 |",
        r"- bf16: loss 3.2",
    ):
        assert row in page, page


def report(path: Path) -> str:
    """The page without the padding of its tables."""
    program = [sys.executable, "-m", "scripts.bench.gpu_report", str(path)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, cwd=ROOT)
    return re.sub(" +", " ", done.stdout)


def test_a_file_that_is_none_of_results(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"stage": 1}\nno json\n')
    program = [sys.executable, "-m", "scripts.bench.gpu_report", str(path)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert f"{path}, line 1, is no result" in done.stderr
