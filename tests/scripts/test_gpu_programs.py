"""Programs for machines with GPUs, run without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.bench import host
from scripts.common.recipes import BF16

ROOT = Path(__file__).resolve().parents[2]
needs_cpu_build = pytest.mark.skipif(
    torch.version.cuda is not None, reason="a build of torch for CUDA looks for its driver"
)


@needs_cpu_build
def test_a_rehearsal_of_captured_steps() -> None:
    """Streams and events in captures are those of CUDA's rules; values are not compared."""
    words = ["-m", "fake_cuda.rehearsal", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, *words, "tests/gpu/test_gpu_graphs.py", "-k", "fsdp2 or delayed"]
    own = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True)
    assert "13 passed" in done.stdout, done.stderr + done.stdout


@needs_cpu_build
def test_host_times(capfd: pytest.CaptureFixture[str]) -> None:
    """Each candidate runs on a rank of several, and bf16 is added."""
    title, head, *rows = host_times(capfd, ["tensorwise", "mxfp8+mxfp4"])
    assert title == ["host, blocks: 1 x 128, ranks: 2, micro-batches: 2"]
    assert head[-5:-1] == ["update", "forward", "backward", "optimizer"]
    assert [row[1] for row in rows] == [BF16, "tensorwise", "mxfp8+mxfp4"]
    assert rows[0][3:6:2] == ["1.00x", "1.00x"]


@needs_cpu_build
def test_host_times_of_experts(capfd: pytest.CaptureFixture[str]) -> None:
    """Eager and compiled; the host reads made-up numbers of rows (3 experts have unequal ones)."""
    compiled = [BF16 + host.COMPILED, "rowwise_folded" + host.COMPILED]
    title, _, *rows = host_times(capfd, ["rowwise_folded", compiled[1]], "--experts", "3")
    assert title[0].endswith(", experts: 3 (torchao.float8 converts none)")
    assert [row[1] for row in rows] == [BF16, compiled[0], "rowwise_folded", compiled[1]]


def host_times(
    capfd: pytest.CaptureFixture[str], candidates: list[str], *options: str
) -> list[list[str]]:
    """The title and the rows of the table, for a small model."""
    small = "--blocks 1 --dim 128 --ranks 2 --micro-batches 2 --repeat 1"
    assert host.main([*small.split(), *options, "--candidates", *candidates]) == 0
    lines = capfd.readouterr().out.splitlines()
    title = [line for line in lines if line.startswith("host, ")]
    head, _, *rows = ([*map(str.strip, line.split("|"))] for line in lines if line[:1] == "|")
    return [title, head, *rows]


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


def bash(script: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "scripts" / script), *words]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


def interpreter(folder: Path, program: str) -> str:
    """The path of an executable program."""
    path = folder / "python"
    path.write_text(program)
    path.chmod(0o755)
    return str(path)


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
