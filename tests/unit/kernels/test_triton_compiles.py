"""Every Triton kernel compiles for GPUs that are not here, and keeps static bounds there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = ROOT / "tests" / "support"


class Gpu(NamedTuple):
    """What a multiprocessor has, and how kernels use it.

    Attributes:
        shared: KB of shared memory. An instance takes 1 KB more than it asks for.
        warps: the largest number.
        instances: how many instances of each kernel it holds at a time, at least.
        spilled: the bytes that a thread may spill.
    """

    shared: int
    warps: int
    instances: int = 2
    spilled: int = 0


# On an Ada, integer arithmetic rounds to float8: instances have more warps, to have more registers.
GPUS = {
    "89": Gpu(shared=100, warps=48, instances=1, spilled=64),
    "90": Gpu(shared=228, warps=64),
    "100": Gpu(shared=228, warps=64),
    "103": Gpu(shared=228, warps=64),
    "120": Gpu(shared=100, warps=48),
}
# Arguments of compile_kernels.py.
TARGETS = ("90", "89", "100,103,120", "gfx942")
# What would change bits: flushed subnormals, fused or approximate operations.
INEXACT = (".ftz", "fma.", ".approx", "div.full", "ex2", "lg2")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("triton")
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    own["PYTHONPATH"] = f"{ROOT}:{SUPPORT}"
    command = [sys.executable, str(SUPPORT / "compile_kernels.py"), *TARGETS]
    done = subprocess.run(command, env=os.environ | own, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def instances(kernel: dict[str, Any], gpu: Gpu) -> int:
    """How many instances a multiprocessor holds at a time."""
    registers = -(-kernel["registers"] // 8) * 8 * 32 * kernel["warps"]
    return min(
        65536 // registers,
        gpu.shared * 1024 // (kernel["shared"] + 1024),
        gpu.warps // kernel["warps"],
    )


@pytest.mark.full
@pytest.mark.compiles
def test_kernels_keep_their_bounds(compiled: list[dict[str, Any]]) -> None:
    """No registers are spilled, floats are rounded to nearest, atomics order no other access."""
    assert {each["architecture"] for each in compiled} == {*GPUS, "gfx942"}
    for kernel in compiled:
        architecture = kernel["architecture"]
        name = f"{kernel['kernel']} {kernel['sizes']} for {architecture}"
        gpu = GPUS.get(architecture)
        assert kernel["spilled"] <= (gpu.spilled if gpu else 0), name
        atomics = re.findall(r"\b(?:atom|red)\.\S+", kernel["assembly"])
        assert all(".relaxed." in each for each in atomics), name
        assert "buffer_wbl2" not in kernel["assembly"], name
        if gpu:
            assert not any(each in kernel["assembly"] for each in INEXACT), name
            assert instances(kernel, gpu) >= gpu.instances, name
        if not kernel["kernel"].startswith("inductor"):
            # Note [Four bytes at a time] in fp8_dist.kernels.cuda.triton.rounding
            made = re.findall(r"satfinite\.e[45]m[23]x2\.f32\s+(\S+),", kernel["assembly"])
            assert {*made} <= (set() if architecture == "89" else {"low", "high"}), name


@pytest.mark.full
def test_a_cast_that_inductor_generates_converts_fp32(compiled: list[dict[str, Any]]) -> None:
    """It does not convert by way of fp16, as it does on an Ada."""
    casts = [each["assembly"] for each in compiled if each["kernel"] == "inductor's cast"]
    assert len(casts) == 2
    for assembly in casts:
        assert set(re.findall(r"cvt\.\w+\.\w*\.?e4m3x2\.\w+", assembly)) == {
            "cvt.rn.satfinite.e4m3x2.f32"
        }


def test_without_triton_the_portable_code_serves() -> None:
    program = """
import sys, warnings
sys.modules["triton"] = None  # as if it were not installed
import torch
from fp8_dist.kernels import cuda, quantization
assert not cuda.HAS_TRITON
assert "cuda" not in quantization.cast_copies.implementations
run = quantization.quantize.implementations["cuda"]
given = torch.ones(2, 16), torch.ones(()), torch.float8_e4m3fn
with warnings.catch_warnings(record=True) as found:
    assert [(run(*given).float() == 1).all() for _ in range(2)] == [True, True]
assert len(found) == 1 and "there is no Triton" in str(found[0].message)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
