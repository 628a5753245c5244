"""The benchmarks of a day with a GPU, on a device that computes nothing."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench import gpu_run
from scripts.bench.gpu_results import Result, read
from scripts.common.candidates import TORCHAO
from scripts.common.recipes import OURS

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = f"{ROOT}:{ROOT}/tests/support"
LAYER = "2048 x 4096 x 14336"


rehearses = pytest.mark.skipif(
    torch.version.cuda is not None, reason="a build of torch for CUDA looks for its driver"
)


def rehearsed(tmp_path: Path, *programs: str) -> list[Result]:
    """Run lines of Python, in which `words` are the options of a stage; return what it wrote."""
    results = tmp_path / "results.jsonl"
    words = ["--repeat", "2", "--results", str(results), "--begun", str(tmp_path / "begun")]
    code = "\n".join(["from scripts.bench import gpu, gpu_run",
                      f"words = {words!r}", *programs])  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "fake_cuda.rehearsal", "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": IMPORTED},
        capture_output=True,
        text=True,
        check=False,
    )
    found = read(results) if results.exists() else []
    assert done.returncode == 0, done.stderr + done.stdout
    assert [line.name for line in found] == [*dict.fromkeys(line.name for line in found)]
    return found


def names(found: list[Result]) -> list[str]:
    return [line.name for line in found if not line.error]


@rehearses
def test_stages(tmp_path: Path) -> None:
    """Few cases of each. What failed is a line, and is not tried again in its process."""
    found = rehearsed(
        tmp_path,
        "run, layer_of = gpu.main, gpu_run.layer_of",
        "def fails(name, *args): assert name != 'rowwise_folded', 'planted'; return layer_of(name, *args)",
        "gpu_run.layer_of, gpu_run.OURS = fails, ('tensorwise', 'rowwise_folded')",
        "gpu_run.BLOCKS = (('tensorwise', True), ('no such', False))",
        "assert run(['versions', *words]) == 0",
        "assert run(['rates', *words, '--only', 'copy', '2048 x 4096']) == 0",
        "assert run(['kernels', *words]) == 3",
        f"assert run(['trace', *words, '--folder', {str(tmp_path)!r}]) == 0",
        "only = ['--rows', '2048', '--turns', '1', '--only', ', bf16', ', tensorwise,', ', rowwise_f']",
        "assert run(['layers', *words, *only]) == 3",
        "small = ['--blocks', '1', '--tokens', '64', '--only', 'tensorwise']",
        "assert run(['blocks', *words, *small]) == 0",
        "assert run(['experts', *words, '--only', '512) rows, bf16']) == 0",
        "assert run(['nccl', *words]) == 3",
    )
    of = {stage: [line for line in found if line.stage == stage] for stage in gpu_run.PARTS}
    assert "fake CUDA device, 141 GB" in of["versions"][0].note
    assert len(of["rates"]) == 2 + 6
    assert of["rates"][0].bytes == 2**31
    gemm = next(line for line in of["rates"] if line.name == f"{LAYER}, float8 by rows")
    assert (gemm.flops, len(gemm.readings)) == (2.0 * 2048 * 4096 * 14336, 2)
    assert names(of["kernels"]) == ["copy, first", "tensorwise", "copy, last"]
    assert re.search(r"_cast BM=\d+ BN=\d+ warps=\d 1000.0 us [\d,]+ GB/s", of["kernels"][1].note)
    assert (tmp_path / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    candidates = ["bf16", "bf16 compiled", "tensorwise"]
    turn = [f"{LAYER}, {name}, turn 1" for name in [*candidates, "bf16, again"]]
    assert names(of["layers"]) == [*turn, *(f"{LAYER}, {name}, wall" for name in candidates)]
    failed = [line for line in of["layers"] if line.error]
    assert [line.compiled for line in failed] == [False, True]
    assert all(line.recipe == "rowwise_folded" and "planted" in line.error for line in failed)
    step, optimizer = of["blocks"]
    assert (step.tokens, step.compiled, step.shape) == (64, True, "1 blocks x 64 tokens")
    assert optimizer.readings == step.readings == (1e-3, 1e-3)
    assert [line.recipe for line in of["experts"]] == ["bf16", "bf16"]
    assert [line.recipe for line in of["nccl"]] == ["bf16", "tensorwise", *TORCHAO[:1]]
    assert "NCCL" in of["nccl"][0].error  # which a build for CPUs has not


def test_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    small = "--model debug --steps 7 --batch-size 2 --seq-len 32"
    monkeypatch.setattr(gpu_run, "TRAINING", small.split())
    found = gpu_run.trained(("bf16", False), 64)
    assert len(found["readings"]) == 7 - gpu_run.WARM_UP
    assert " after 7 steps" in found["note"]


def test_a_group_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(*parts: Any) -> list[float]:
        begin = time.perf_counter()
        for part in parts:
            part()
        return [time.perf_counter() - begin]

    monkeypatch.setattr(gpu_run, "event_seconds", seconds)
    found = gpu_run.measured_alone("tensorwise", torch.device("cpu"), 2)
    assert len(found["readings"]) == 2
    assert found["note"].startswith("the mean of a sum of ones is 1, loss 5.")
    assert not torch.distributed.is_initialized()


def test_the_most_wanted_come_first() -> None:
    variants = gpu_run.layer_variants(gpu_run.ROWS)
    first = [(name, kind) for name in ("bf16", "tensorwise", "rowwise") for kind in (False, True)]
    assert variants[:6] == first
    assert variants[6:8] == [(name, True) for name in TORCHAO[:2]] or len(TORCHAO) < 2
    assert {name for name, _ in variants} == {"bf16", *OURS, *TORCHAO[:2]}
    assert len(set(variants)) == len(variants)
    assert {name for name, _ in gpu_run.layer_variants(2048)} < {name for name, _ in variants}
    assert (gpu_run.BLOCKS[0], gpu_run.RUNS[0]) == (("bf16", False), ("bf16", True))
