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
    small = "--blocks 1 --dim 128 --ranks 2 --micro-batches 2 --repeat 1"
    chosen = ["tensorwise", "mxfp8+mxfp4"]
    assert host.main([*small.split(), "--candidates", *chosen]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "host, blocks: 1 x 128, ranks: 2, micro-batches: 2" in lines
    head, _, *rows = ([*map(str.strip, line.split("|"))] for line in lines if line[:1] == "|")
    assert head[-5:-1] == ["update", "forward", "backward", "optimizer"]
    assert [row[1] for row in rows] == [BF16, *chosen]
    assert rows[0][3:6:2] == ["1.00x", "1.00x"]


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
