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
        if name in ("_gemm_scales", "_tiled_exponents", "_scaling", "_record"):
            continue  # they move a few numbers
        # Contiguous matrices are read, and written, 16 bytes at a time.
        casts = name.startswith(("_cast", "_fold", "_reblock")) and kernel["writes_data"]
        assert "ld.global.v4.b32" in ptx, name
        writes = casts or name.startswith(("_transpose", "_dequantize", "_sum"))
        assert ("st.global.v4.b32" in ptx) is writes, name
        assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) is (casts or name == "_encode"), name


@pytest.mark.full
def test_kernels_compile_for_amd(tmp_path: Path) -> None:
    assert all(kernel["bytes"] for kernel in compiled("gfx942", tmp_path))


def test_without_triton_the_portable_code_serves() -> None:
    program = """
import sys, warnings
sys.modules["triton"] = None  # as if it were not installed
import torch
from fp8_dist import kernels
from fp8_dist.kernels import cuda
assert not cuda.HAS_TRITON
assert "cuda" not in kernels.cast_copies.implementations
run = kernels.quantize.implementations["cuda"]
given = torch.ones(2, 16), torch.ones(()), torch.float8_e4m3fn
with warnings.catch_warnings(record=True) as found:
    assert [(run(*given).float() == 1).all() for _ in range(2)] == [True, True]
assert len(found) == 1 and "there is no Triton" in str(found[0].message)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
