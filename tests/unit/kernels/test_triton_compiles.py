"""Every Triton kernel compiles for GPUs that are not here, in a process without the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "support" / "compile_kernels.py"


def compiled(architecture: str, cache: Path) -> list[dict[str, Any]]:
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, PROGRAM, architecture]
    done = subprocess.run(command, env=os.environ | own, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


@pytest.mark.full
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    for kernel in compiled("90", tmp_path):
        name, ptx = kernel["name"], kernel["assembly"]
        assert kernel["bytes"]
        # What would change bits: flushed subnormals, fused or approximate operations.
        for absent in (".ftz", "fma.", ".approx", "div.full", "ex2", "lg2"):
            assert absent not in ptx, name
        if name in ("_gemm_scales", "_tiled_exponents"):
            continue  # they move a byte per block
        # Contiguous matrices are read, and written, 16 bytes at a time.
        casts = name.startswith(("_cast", "_fold", "_reblock"))
        assert "ld.global.v4.b32" in ptx, name
        writes = casts or name.startswith(("_transpose", "_dequantize", "_sum"))
        assert ("st.global.v4.b32" in ptx) is writes, name
        assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) is (casts or name == "_encode"), name


@pytest.mark.full
def test_kernels_compile_for_amd(tmp_path: Path) -> None:
    assert all(kernel["bytes"] for kernel in compiled("gfx942", tmp_path))


def test_without_triton_the_other_route_serves() -> None:
    program = """
import sys
sys.modules["triton"] = None  # as if it were not installed
from fp8_dist.kernels import cuda
from fp8_dist.kernels.cuda import block_operators, operators
assert not cuda.HAS_TRITON
functions = [name for name in cuda.__all__ if name.islower()]
assert len(functions) == 28
for name in functions:
    route = operators if hasattr(operators, name) else block_operators
    assert getattr(cuda, name) is getattr(route, name)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
