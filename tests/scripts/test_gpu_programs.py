"""The programs for machines with GPUs, run without one: gpu_day, its cases and its tables."""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from scripts.bench import gpu, gpu_report, gpu_results, gpu_run, gpu_tests, host
from scripts.bench.gpu_day import CALLS, SECONDS, Day, Group, Stage
from scripts.bench.gpu_results import BEHIND, FAILED, Result, add_options, append, read, run
from scripts.common.candidates import TORCHAO
from scripts.common.recipes import BF16, OURS

ROOT = Path(__file__).resolve().parents[2]
LAYER = "2048 x 4096 x 14336"

needs_cpu_build = pytest.mark.skipif(
    torch.version.cuda is not None, reason="a build of torch for CUDA looks for its driver"
)

# Calls and stages of gpu_day

# A fake interpreter that reports a GPU, and whose stages append a line.
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
import argparse, os, sys, time, types
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=bool))
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


def bash(script: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "scripts" / script), *words]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


def interpreter(folder: Path, program: str) -> str:
    """The path of an executable program."""
    path = folder / "python"
    path.write_text(program)
    path.chmod(0o755)
    return str(path)


def test_faults_leave_every_other_line(tmp_path: Path) -> None:
    """Cases that raise, break the device, end the process or hang don't affect other results."""
    group = Group(300, (Stage("faults", ("-c", FAULTS), patience=5),))
    Day(sys.executable, tmp_path, tmp_path).run([group], time.monotonic(), 300)
    errors = {result.name: result.error for result in read(tmp_path / "results.jsonl")}
    assert errors.pop("hangs").startswith("stopped after 5")
    assert errors == {
        "first": "",
        "fails": "ValueError: planted",
        "poisons": "ValueError: planted",
        "dies": "ended with status 9",
        "last": "",
    }
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    assert left == []


def test_a_group_ends_at_its_time_and_its_results_are_kept(tmp_path: Path) -> None:
    """Other stages of this and later groups have full results. Exit status 1 is an error."""
    slow = "import time; print('begins', flush=True); time.sleep(99)"
    program = {"slow": slow, "quick": "print()", "last": "print(1)"}
    program |= {"import": "import nosuchmodule", "status": "raise SystemExit(3)"}
    stages = {name: Stage(name, ("-c", code)) for name, code in program.items()}
    others = [stages[name] for name in ("last", "import", "status")]
    groups = [Group(4, (stages["slow"], stages["quick"])), Group(60, (*others,))]
    begin = time.monotonic()
    Day(sys.executable, tmp_path, tmp_path).run(groups, begin, 60)
    assert time.monotonic() - begin < 60
    errors = {(r.stage, r.name): r.error for r in read(tmp_path / "results.jsonl")}
    assert errors == {
        ("slow", "start"): "stopped at the end of its time",
        ("import", "start"): "ended with status 1",
    }
    assert "begins" in (tmp_path / "slow.log").read_text()
    assert (tmp_path / "last.log").read_text() == "1\n"


def test_a_call(tmp_path: Path) -> None:
    python, results = interpreter(tmp_path, PYTHON), tmp_path / "results"
    done = bash("gpu_day.sh", "A", str(results), PY=python, GPU_PACK=f"{tmp_path}/none")
    assert done.returncode == 0, (done.stdout, done.stderr)
    stages = [stage.name for group in CALLS["A"] for stage in group.stages]
    assert [line.split(": ")[0] for line in done.stdout.splitlines()[:-1]] == stages
    assert {r.stage for r in read(results / "results.jsonl")} == {*stages}
    with tarfile.open(results / "log_A.tgz") as archive:
        assert "logs_A/tests.log" in archive.getnames()


def test_a_call_needs_a_gpu(tmp_path: Path) -> None:
    done = bash("gpu_day.sh", "D", str(tmp_path), PY=sys.executable)
    assert (done.returncode, done.stderr[:7]) == (2, "usage: ")
    done = bash("gpu_day.sh", "A", str(tmp_path), PY=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "finds no CUDA device: install torch for CUDA" in done.stderr


def test_calls_fit_their_time_and_programs_take_the_words_of_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []

    def run_tests(options: list[str], plugins: list[Any]) -> int:
        started.append("tests")
        return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu_results, "run", lambda args, cases: started.append(args.stage))
    monkeypatch.setattr(pytest, "main", run_tests)
    for call, groups in CALLS.items():
        assert sum(group.seconds for group in groups) <= SECONDS[call] - 4  # for starting
        names = [stage.name for group in groups for stage in group.stages]
        assert len({*names}) == len(names)
        started.clear()
        for stage in (stage for group in groups for stage in group.stages):
            main = {"gpu": gpu, "gpu_tests": gpu_tests}
            program = main[stage.words[1].rpartition(".")[2]]
            program.main([*stage.words[2:], "--stage", stage.name])
        assert started == ["tests" if name == "ranks" else name for name in names]


# Results, and the page that shows them


def test_cases_that_can_not_be_made_are_an_error(tmp_path: Path) -> None:
    """The error is written no matter which cases were chosen, even after a truncated line."""

    def cases() -> Iterator[tuple[str, Callable[[], Result]]]:
        yield "first", Result
        raise RuntimeError("no more")

    parser, path = argparse.ArgumentParser(), tmp_path / "results.jsonl"
    path.write_text('{"stage": "cut o')  # its writer was stopped
    add_options(parser, "stage")
    args = parser.parse_args(["--results", str(path), "--only", "first"])
    assert run(args, cases()) == FAILED
    results = [(r.name, r.error) for r in read(path)]
    assert results == [("first", ""), (BEHIND, "RuntimeError: no more")]


def test_a_page_of_canned_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page has medians over all turns, and the repeated baseline."""
    path, shape = tmp_path / "results.jsonl", "8192 x 4096 x 14336"
    ident = {"card": "NVIDIA H100", "commit": "abc"}
    layer_fields = {"shape": shape, "tokens": 8192, "flops": 2.9e12, **ident}
    lines = [
        Result("start", "versions", note="NVIDIA H100, torch 2.11.0", **ident),
        Result("ranks", "amax, odd, launched", **ident),
        Result("ranks", "quantize, odd, launched", error="AssertionError: 3 differ", **ident),
        Result("ranks", "quantize, odd, launched", note="mended", **ident),
        Result("tests", "test_gemms", error="RuntimeError: refused", **ident),
        Result("rates", "copy", readings=(1e-3, 2e-3, 3e-3), bytes=6 * 10**9, **ident),
        Result("kernel rates", "tensorwise", "tensorwise", note="_cast 2 us", **ident),
        Result("layers", f"{shape}, bf16, turn 1", "bf16", readings=(4e-3, 5e-3), **layer_fields),
        Result("layers", f"{shape}, bf16, turn 2", "bf16", readings=(9e-3,), **layer_fields),
        Result("layers", f"{shape}, bf16, again, turn 1", "bf16", readings=(6e-3,), **layer_fields),
        Result("layers", f"{shape}, tensorwise compiled, turn 1", "tensorwise", True, readings=(2.5e-3,), peak=10**9, **layer_fields),
        Result("layers", f"{shape}, bf16, wall", "bf16", readings=(7e-3,), **layer_fields),
        Result("blocks", "bf16, step", "bf16", shape="8 blocks", readings=(0.3,), tokens=8192, **ident),
        Result("blocks", "bf16, optimizer", "bf16", shape="8 blocks", readings=(0.1,), tokens=8192, **ident),
        Result("training", "bf16", "bf16", shape="1b", readings=(0.5,), tokens=4096, note="loss 3.2", **ident),
    ]  # fmt: skip
    for line in lines:
        append(path, line)
    assert gpu_report.main([str(path)]) == 0
    page = re.sub(" +", " ", capsys.readouterr().out)
    for row in (
        r"Card: NVIDIA H100. Commit: abc.",
        r"- NVIDIA H100, torch 2.11.0",
        r"| ranks | 2 | 0 |",
        r"- tests: test_gemms: RuntimeError: refused",
        r"| copy | 3.00 TB/s | 4 TB/s | 1.000 to 3.000 |",
        r"- tensorwise: _cast 2 us",
        r"| bf16 | 5.000 | 4.000 to 9.000 | 1.00 | 1,638,400 | 580 | |",
        r"| bf16, again | 6.000 | 6.000 to 6.000 | 0.83 |",
        r"| tensorwise, compiled | 2.500 | 2.500 to 2.500 | 2.00 |",
        r"| bf16 | 300.000 | 300.000 to 300.000 | 100.000 | 100.000 to 100.000 | 20,480 |",
        r"- bf16: loss 3.2",
    ):
        assert row in page, page
    path.write_text(json.dumps({"stage": 1}))
    with pytest.raises(SystemExit, match=r"^2$"):
        gpu_report.main([str(path)])
    assert f"{path}, line 1, is no result" in capsys.readouterr().err


# Benchmarks, on a fake device that computes nothing


def names(results: list[Result]) -> list[str]:
    return [line.name for line in results if not line.error]


@needs_cpu_build
def test_a_rehearsal_of_captured_steps() -> None:
    """Streams and events in captures are those of CUDA's rules; values are not compared."""
    words = ["-m", "fake_cuda.rehearsal", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, *words, "tests/gpu/test_gpu_graphs.py", "-k", "fsdp2 or delayed"]
    own = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True)
    assert "13 passed" in done.stdout, done.stderr + done.stdout


@needs_cpu_build
def test_a_rehearsal(tmp_path: Path) -> None:
    """Run a few cases of each stage. Failures are written, and not tried again in their process."""
    path = tmp_path / "results.jsonl"
    words = ["--repeat", "2", "--results", str(path), "--begun", str(tmp_path / "begun")]
    code = f"""
from scripts.bench import gpu, gpu_run
run, layer_of, words = gpu.main, gpu_run.layer_of, {words!r}

def fails(name, *args):
    assert name != "rowwise_folded", "planted"
    return layer_of(name, *args)

gpu_run.layer_of, gpu_run.OURS = fails, ("tensorwise", "rowwise_folded")
gpu_run.BLOCKS = (("tensorwise", False), ("no such", False))
assert run(["versions", *words]) == 0
assert run(["rates", *words, "--only", "copy", "2048 x 4096"]) == 0
assert run(["kernels", *words]) == 3
only = ["--rows", "2048", "--turns", "1", "--only", ", bf16", ", tensorwise,", ", rowwise_f"]
assert run(["layers", *words, *only]) == 3
small = ["--blocks", "1", "--tokens", "64", "--only", "tensorwise"]
assert run(["blocks", *words, *small]) == 0
assert run(["experts", *words, "--only", "512) rows, bf16"]) == 0
assert run(["nccl", *words]) == 3
"""
    own = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/tests/support"}
    command = [sys.executable, "-m", "fake_cuda.rehearsal", "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    lines: dict[str, list[Result]] = {}
    for line in read(path):
        lines.setdefault(line.stage, []).append(line)
    assert "fake CUDA device, 141 GB" in lines["versions"][0].note
    assert len(lines["rates"]) == 2 + 6
    assert lines["rates"][0].bytes == 2**31
    gemm = next(line for line in lines["rates"] if line.name == f"{LAYER}, float8 by rows")
    assert (gemm.flops, len(gemm.readings)) == (2.0 * 2048 * 4096 * 14336, 2)
    assert names(lines["kernels"]) == ["copy, first", "tensorwise", "copy, last"]
    assert re.search(r"_cast 1000.0 us [\d,]+ GB/s", lines["kernels"][1].note)
    candidates = ["bf16", "bf16 compiled", "tensorwise"]
    turn = [f"{LAYER}, {name}, turn 1" for name in [*candidates, "bf16, again"]]
    assert names(lines["layers"]) == [*turn, *(f"{LAYER}, {name}, wall" for name in candidates)]
    failed = [line for line in lines["layers"] if line.error]
    assert [line.compiled for line in failed] == [False, True]
    assert all(line.recipe == "rowwise_folded" and "planted" in line.error for line in failed)
    step, optimizer = lines["blocks"]
    assert (step.tokens, step.compiled, step.shape) == (64, False, "1 blocks x 64 tokens")
    assert optimizer.readings == step.readings == (1e-3, 1e-3)
    assert [line.recipe for line in lines["experts"]] == ["bf16", "bf16"]
    assert [line.recipe for line in lines["nccl"]] == ["bf16", "tensorwise", *TORCHAO[:1]]
    assert "NCCL" in lines["nccl"][0].error  # which a CPU build lacks


@needs_cpu_build
def test_host_times(capfd: pytest.CaptureFixture[str]) -> None:
    """Each candidate runs on a rank of several, and bf16 is added."""
    small = "--blocks 1 --dim 128 --ranks 2 --micro-batches 2 --repeat 1"
    chosen = ["tensorwise", "mxfp8+mxfp4"]
    assert host.main([*small.split(), "--candidates", *chosen]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "host, blocks: 1 x 128, ranks: 2, micro-batches: 2" in lines
    head, _, *rows = ([*map(str.strip, line.split("|"))] for line in lines if line[:1] == "|")
    assert head[-5:-1] == ["update", "forward", "backward", "optimizer"]
    assert [row[1] for row in rows] == [BF16, *chosen]
    assert rows[0][3:6:2] == ["1.00x", "1.00x"]


def test_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    small = "--model debug --steps 7 --batch-size 2 --seq-len 32"
    monkeypatch.setattr(gpu_run, "TRAINING", small.split())
    result = gpu_run.trained(("bf16", False), 64)
    assert len(result["readings"]) == 7 - gpu_run.WARM_UP
    assert " after 7 steps" in result["note"]


def test_a_group_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(*parts: Any) -> list[float]:
        for part in parts:
            part()
        return [1.0]

    monkeypatch.setattr(gpu_run, "event_seconds", seconds)
    result = gpu_run.measured_alone("tensorwise", torch.device("cpu"), 2)
    assert len(result["readings"]) == 2
    assert result["note"].startswith("the mean of a sum of ones is 1, loss 5.")
    assert not torch.distributed.is_initialized()


def test_the_most_wanted_come_first() -> None:
    variants = gpu_run.layer_variants(gpu_run.ROWS)
    first = [(name, kind) for name in ("bf16", "tensorwise", "rowwise") for kind in (False, True)]
    assert variants[:6] == first
    assert {name for name, _ in variants} == {"bf16", *OURS, *TORCHAO[:2]}
    assert len(set(variants)) == len(variants)
    assert {name for name, _ in gpu_run.layer_variants(2048)} < {name for name, _ in variants}


# torchtitan's models on GPUs

TRAINS = f"""#!{sys.executable}
import sys
if sys.argv[1] == "-c":
    print(4)
else:
    print("step: 19  loss: 3.0")
    print("step: 20  loss: 2.5 ", *sys.argv[1:])
    sys.exit("delayed" in " ".join(sys.argv))
"""


def test_torchtitan_trains_in_each_recipe_with_both_back_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    python, words = interpreter(tmp_path, TRAINS), ("llama3_8b", "--compile.enable")
    elsewhere = bash("gpu_torchtitan.sh", *words, PY=python)
    assert elsewhere.returncode == 1
    assert "is no checkout of torchtitan" in elsewhere.stderr
    (tmp_path / "tests/assets/tokenizer").mkdir(parents=True)
    done = bash("gpu_torchtitan.sh", *words, PY=python)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * 2 * 6
    failed = [line for line in lines if line.endswith("FAILED")]
    assert len(failed) == 4
    assert all("delayed" in line for line in failed)
    assert done.returncode == 1
    command = (
        "step: 20  loss: 2.5  -m torch.distributed.run --standalone --nproc-per-node 4 "
        "-m torchtitan.train --module fp8_dist.integrations.torchtitan "
        "--config llama3_8b_rowwise_folded --training.steps 20 --parallelism.spmd_backend "
        "spmd_types --parallelism.tensor_parallel_degree 2 --compile.enable"
    )
    assert f"outputs/fp8_dist/rowwise_folded-spmd_types-tp2.log: {command}" in lines
