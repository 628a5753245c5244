"""The script that trains torchtitan's models on GPUs, with an interpreter that pretends to."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/gpu_torchtitan.sh"
PRETENDS = f"""#!{sys.executable}
import sys
if sys.argv[1] == "-c":
    print(GPUS)
else:
    print("step: 19  loss: 3.0")
    print("step: 20  loss: 2.5 ", *sys.argv[1:])
    sys.exit("delayed" in " ".join(sys.argv))
"""


def run(folder: Path, gpus: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    python = folder / "python"
    python.write_text(PRETENDS.replace("GPUS", str(gpus)))
    python.chmod(0o755)
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        cwd=folder,
        env={"PY": str(python), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_trains_in_each_recipe_with_both_back_ends(tmp_path: Path) -> None:
    (tmp_path / "tests/assets/tokenizer").mkdir(parents=True)
    done = run(tmp_path, 4, "llama3_8b", "--compile.enable")
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


def test_it_needs_gpus_and_torchtitan(tmp_path: Path) -> None:
    without_gpus, elsewhere = run(tmp_path, 0), run(tmp_path, 2)
    assert without_gpus.returncode == elsewhere.returncode == 1
    assert "no CUDA device" in without_gpus.stderr
    assert "is no checkout of torchtitan" in elsewhere.stderr
