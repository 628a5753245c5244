"""The day with a GPU, rehearsed on a device that computes nothing."""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from scripts.bench.gpu_day import CALLS, SECONDS, Day, Group, Stage, groups_of, stage
from scripts.bench.gpu_results import BEHIND, FAILED, Result, add_options, append, read, run

ROOT = Path(__file__).resolve().parents[2]
# An interpreter that runs stages on the stub device, each with the fault that is planted in it.
PYTHON = f"""#!{sys.executable}
import os, shlex, sys
from pathlib import Path
kind, program, *words = sys.argv[1:]
if kind == "-c":
    code = program
elif program == "scripts.bench.gpu_day":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:], "--python", sys.argv[0]])
elif program == "scripts.bench.gpu_tests":  # others, on the CPU
    words = ["tests/unit/test_summary.py", *words[words.index("--stage"):]]
    os.execv(sys.executable, [sys.executable, kind, program, *words])
else:
    name = words[words.index("--stage") + 1].replace(" ", "_")
    fault = Path(sys.argv[0]).with_name("fault_" + name + ".py")
    words += shlex.split(os.environ.get("CHOSEN_" + name, ""))
    code = fault.read_text() if fault.exists() else ""
    code += f"import runpy, sys; sys.argv = {{[program, *words]!r}}\\n"
    code += f"runpy.run_module({{program!r}}, run_name='__main__', alter_sys=True)\\n"
os.environ["PYTHONPATH"] = "{ROOT}:{ROOT}/tests/support"
rehearsal = [sys.executable, "-m", "fake_cuda.rehearsal", "-c", code]
os.execv(sys.executable, rehearsal)
"""


rehearses = pytest.mark.skipif(
    torch.version.cuda is not None, reason="the stub is for builds of torch without CUDA"
)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(PYTHON)
    path.chmod(0o755)
    return path


RAISES = """
from fp8_dist.kernels.cuda.triton import amaxes
def run(*args, **options):
    raise ValueError("planted")
amaxes._many.kernel.run = run
"""
HANGS = """
import time
from fp8_dist.kernels.cuda.triton import casts
casts._scaling.kernel.run = lambda *args, **options: time.sleep(1000)
"""
POISONS = """
import torch
from fp8_dist.kernels.cuda.triton import casts
def run(*args, **options):
    def fail(device=None):
        raise RuntimeError("an illegal memory access was encountered")
    torch.cuda.synchronize = fail
    fail()
casts._poison.kernel.run = run
"""


@rehearses
def test_faults_leave_every_other_line(tmp_path: Path, python: Path) -> None:
    """A kernel raises, one never ends, and one leaves a device that answers no more."""
    chosen = ["amax_of_each, aligned", "scaling_from_amax e5m2, aligned, choice 0, side stream"]
    chosen += ["cast_and_measure e5m2, odd, choice 0", "quantize, odd, choice"]
    for name, fault in (("raises", RAISES), ("hangs", HANGS), ("poisons", POISONS)):
        (tmp_path / f"fault_{name}.py").write_text(fault)
    words = ("kernels", "--only", *chosen)
    stages = [stage(n, "gpu_smoke", *words, patience=60) for n in ("well", "raises", "hangs")]
    stages.append(stage("poisons", "gpu_smoke", *words, patience=60))
    groups, limit = [Group(300, tuple(stages[:2])), Group(300, tuple(stages[2:]))], 600
    begin = time.monotonic()
    Day(str(python), tmp_path, tmp_path).run(groups, begin, limit)
    assert time.monotonic() - begin < limit
    results = read(tmp_path / "results.jsonl")
    names = {each.name: [r.name for r in results if r.stage == each.name] for each in stages}
    assert len(names["well"]) > 10
    assert all(found == names["well"] for found in names.values())
    errors = Counter(
        (r.stage, r.name.split(", ")[0], r.error.split(" after ")[0]) for r in results if r.error
    )
    poisoned = "RuntimeError: an illegal memory access was encountered"
    # The portable code launches none of them.
    of_name = Counter(n.split(", ")[0] for n in names["well"] if not n.endswith(", portable"))
    assert errors == {
        ("raises", "amax_of_each", "ValueError: planted"): of_name["amax_of_each"],
        ("hangs", "scaling_from_amax e5m2", "stopped"): 1,
        ("poisons", "cast_and_measure e5m2", poisoned): of_name["cast_and_measure e5m2"],
    }
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    assert left == []


# Few cases of each stage.
CHOSEN = {
    "gemms": "'tensorwise, 64'",
    "steps": "'tensorwise, eager'",
    "inductor": "'64 x 64, relu'",
    "rates": "copy",
    "layers": "2048",
    **{f"kernels_{i}": "'both layouts, aligned' 'amax_of_each, aligned'" for i in range(1, 7)},
}


def environment(python: Path, folder: Path) -> dict[str, str]:
    chosen = {f"CHOSEN_{stage}": f"--only {text}" for stage, text in CHOSEN.items()}
    kernels = {"TRITON_CACHE_DIR": str(folder / "triton"), "GPU_PACK": str(folder / "no pack")}
    return chosen | kernels | {"PY": str(python)}


def day(python: Path, call: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_day.sh"), call, str(folder), *options],
        env=os.environ | environment(python, folder),
        capture_output=True,
        text=True,
        check=False,
    )


@rehearses
def test_a_call_and_its_kernels_that_are_compiled_once(tmp_path: Path, python: Path) -> None:
    done = day(python, "A", tmp_path, "--seconds", "3000")
    results = read(tmp_path / "results.jsonl")
    assert done.returncode == 0, (done.stdout, done.stderr)
    stages = [stage.name for group in CALLS["A"] for stage in group.stages]
    assert [line.split(": ")[0] for line in done.stdout.splitlines()[:-1]] == stages
    seen = {r.stage for r in results}
    assert {stage for stage in stages if not stage.startswith("kernels")} < seen <= {*stages}
    assert all(r.card and r.commit for r in results)
    with tarfile.open(tmp_path / "log_A.tgz") as archive:
        assert "logs_A/kernels_1.log" in archive.getnames()
    compiled = {path.name for path in (tmp_path / "triton").iterdir()}
    assert len(compiled) > 5
    with pytest.MonkeyPatch.context() as patched:
        for name, text in environment(python, tmp_path).items():
            patched.setenv(name, text)
        again = Group(1000, tuple(each for each in CALLS["A"][1].stages if each.name in seen))
        Day(str(python), tmp_path, tmp_path).run([again], time.monotonic(), 1000)
    assert {path.name for path in (tmp_path / "triton").iterdir()} == compiled


@rehearses
def test_what_is_compiled_ahead_is_found(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    only = ("--only", "amax_of_each", "scaling_from_amax")
    subprocess.run([sys.executable, "-m", "scripts.bench.gpu_ahead", *only], check=True, cwd=ROOT)
    ahead = {path.name for path in (tmp_path / "triton").iterdir()}
    assert ahead
    stages = (stage("kernels", "gpu_smoke", "kernels", *only), stage("look", "gpu_ahead", "--look"))
    for each in stages:
        Day(str(python), tmp_path, tmp_path).run([Group(900, (each,))], time.monotonic(), 900)
        if each.name == "kernels":
            assert {path.name for path in (tmp_path / "triton").iterdir()} == ahead
    results = read(tmp_path / "results.jsonl")
    assert len(results) > 10
    assert not [r for r in results if r.error]
    assert re.match(rf"{len(ahead)} entries; of \d+ kernels \d+ were not found", results[-1].note)


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
    groups = [Group(4, (slow, quick)), Group(60, (last,))]
    Day(sys.executable, tmp_path, tmp_path).run(groups, begin, 64)
    assert time.monotonic() - begin < 60
    (result,) = read(tmp_path / "results.jsonl")
    assert (result.stage, result.error) == ("slow", "stopped at the end of its time")
    assert "slow" in (tmp_path / "slow.log").read_text()
    assert "last" in (tmp_path / "last.log").read_text()


def test_what_failed_is_tried_again_first(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for stage_, name, error in (
        ("kernels 2", "a", "E"),
        ("kernels 2", "b", ""),
        ("rates", "c", ""),
    ):
        append(path, Result(stage_, name, error=error))
    start, second, *rest = groups_of("B", path, 2.0)
    (again,) = second.stages
    assert again.name == "kernels 2, again"
    assert again.words[-4:] == ("--again", str(path), "--of", "kernels 2")
    assert [stage.name for group in (start, *rest) for stage in group.stages] == [
        stage.name for group in CALLS["B"] for stage in group.stages
    ]
    assert start.seconds == 2 * CALLS["B"][0].seconds


@pytest.mark.parametrize("call", CALLS)
def test_a_call_fits_its_time(call: str) -> None:
    assert sum(group.seconds for group in CALLS[call]) <= SECONDS[call] - 4  # of starting
    names = [stage.name for group in CALLS[call] for stage in group.stages]
    assert len({*names}) == len(names)


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
        Result("kernels 2, again", "quantize, odd, choice 1", note="mended", **ident),
        Result("gemms", "tensorwise, output", note="accepted, 52.1 dB", **ident),
        Result("gemms", "mxfp8, output", error="RuntimeError: refused", **ident),
        Result("rates", "copy", readings=(1e-3, 2e-3, 3e-3), bytes=6 * 10**9, **ident),
        Result("kernel rates", "copy, first", readings=(1e-3,), bytes=3 * 10**9, **ident),
        Result("kernel rates", "tensorwise: _cast", readings=(1e-3,), bytes=2 * 10**9, note="BM=64", **ident),
        Result("kernel rates", "copy, last", readings=(1e-3,), bytes=5 * 10**9, **ident),
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
        r"- gemms: mxfp8, output: RuntimeError: refused",
        r"| tensorwise, output | accepted, 52.1 dB | |",
        r"| copy | 3.00 TB/s | 4 TB/s | 1.000 to 3.000 |",
        r"| tensorwise: _cast | BM=64 | 1000.000 | 1000.000 to 1000.000 | 2,000 | 0.50 |",
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
