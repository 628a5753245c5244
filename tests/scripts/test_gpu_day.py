"""The day with a GPU, rehearsed: its programs on a device that computes nothing, without tests."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PRETENDS = f"""#!{sys.executable}
import os, sys, time
words = sys.argv[1:]
if words[1] == "pytest":
    if "--collect-only" in words:
        print("tests/a.py::test_one[two words]", *(f"tests/b.py::test_{{n}}" for n in range(20)), sep="\\n")
    else:
        time.sleep(float(os.environ.get("SLOW", "0")))
        print(sum("::" in word for word in words), "passed")
elif "step" in words:  # NCCL
    print("a step")
elif "layers" in words and "SLOW" in os.environ:
    print("a layer", flush=True)
    time.sleep(float(os.environ["SLOW"]))
else:
    words = ["0.05" if before == "--budget-minutes" else word
             for before, word in zip(["", *words], words)]
    program = [sys.executable, "-m", "scripts.common.fake_cuda.rehearsal", *words]
    os.execv(sys.executable, program)
"""


def day(folder: Path, *parts: str, **environment: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    python = folder / "python"
    python.write_text(PRETENDS)
    python.chmod(0o755)
    return subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_day.sh"), str(folder / "results"), *parts],
        env=os.environ | {"PY": str(python)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_each_part_leaves_what_it_found(tmp_path: Path) -> None:
    done = day(tmp_path)
    results = tmp_path / "results"
    shown = {path.name: path.read_text() for path in results.iterdir()}
    assert done.returncode == 0, shown
    parts = ("probe", "tests", "kernels", "layers", "training", "triton")
    for part, line in zip(parts, shown["summary.txt"].splitlines(), strict=True):
        assert line.startswith(f"{part}: went well after ")
        assert line.endswith(f" s, {part}.txt")
    assert "8192 x 4096 x 14336, float8 in blocks of 128: 962.07 TFLOP/s" in shown["probe.txt"]
    assert sum(int(n.split()[0]) for n in shown["tests.txt"].splitlines()[1:]) == 21
    assert "delayed: _cast (torch.bfloat16" in shown["kernels.txt"]
    assert "8b w1, w3, 8191 rows: bf16: 1.000 ms" in shown["layers.txt"]
    assert "| candidate | " in shown["layers.txt"]
    assert shown["training.txt"].endswith("a step\n")
    assert len(shown) == 8
    assert "trace_tensorwise.json" in shown


def test_a_part_ends_at_its_limit_and_the_next_one_begins(tmp_path: Path) -> None:
    done = day(tmp_path, "tests", "layers", SLOW="100", FP8_DIST_PART_SECONDS="10")
    assert done.returncode == 1
    tests, layers = (tmp_path / "results/summary.txt").read_text().splitlines()
    assert tests.startswith("tests: stopped at its limit after 1")
    assert layers.startswith("layers: stopped at its limit after 1")
    assert (tmp_path / "results/layers.txt").read_text() == "a layer\n"
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    assert left == []


def test_there_must_be_a_gpu_and_such_a_part(tmp_path: Path) -> None:
    script = str(ROOT / "scripts/gpu_day.sh")
    environment = os.environ | {"PY": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    for words, status, message in (
        ([], 2, "usage: "),
        ([str(tmp_path), "prob"], 2, "with parts of: probe tests kernels"),
        ([str(tmp_path)], 1, "finds no CUDA device: install torch for CUDA"),
    ):
        done = subprocess.run(
            ["bash", script, *words], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == status
        assert message in done.stderr
