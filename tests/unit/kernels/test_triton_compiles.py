"""Every Triton kernel compiles for GPUs that are not here, and keeps static bounds there."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from ptx import Instance
from static_bounds import broken, has_relaxed_atomics

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "support" / "compile_kernels.py"
# They move a few numbers.
FEW = ("_gemm_scales", "_tiled_exponents", "_scaling", "_poison")
# Bounds that kernels do not keep, with any choice of block sizes. Codes are made for links, which are
# slower than memory.
KNOWN = {"_encode": {"issue"}}
if version("triton") < "3.7":
    # It lets threads share columns, whose maxima then pass between them.
    KNOWN |= {"_cast": {"issue"}, "_reblock": {"issue"}}

Kernels = list[dict[str, Any]]


def compiled(folder: Path, *words: str) -> Kernels:
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, PROGRAM, *words]
    done = subprocess.run(command, env=os.environ | own, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


@pytest.mark.full
@pytest.mark.compiles
def test_kernels_keep_their_bounds_on_hopper(tmp_path: Path) -> None:
    choices = defaultdict(list)
    for kernel in compiled(tmp_path, "90"):
        assert kernel["traffic"]["bytes"]
        choices[kernel["case"], kernel["kernel"]].append(broken(kernel))
    found = defaultdict(set)
    for (_, name), each in choices.items():
        # Which choice issues least is for the tuner to find.
        of_all = set.union(*each) - {"issue"} | set.intersection(*each)
        found[name] |= of_all - ({"narrow", "issue"} if name in FEW else set())
    assert {name: bounds for name, bounds in found.items() if bounds} == KNOWN


@pytest.mark.full
def test_bounds_refuse_the_kernels_that_they_were_written_for(tmp_path: Path) -> None:
    found = {(k["kernel"], k["choice"]): broken(k) for k in compiled(tmp_path, "90", "former")}
    assert found == {
        ("_ordered_amax", "BM=64 BN=64 warps=4"): {"atomics"},
        ("_columns_of_each_tile", "BM=16 BN=128 warps=4"): {"conflicts", "shared"},
        ("_columns_of_each_tile", "BM=16 BN=256 warps=8"): {"conflicts", "shared"},
        ("_approximate", "BM=64 BN=64 warps=4"): {"exact"},
        ("_tiles", "BM=16 BN=128 warps=4"): {"conflicts"},
        ("_tiles", "BM=32 BN=128 warps=8"): {"conflicts"},
        ("_fold_rows", "BM=8 BN=2048 warps=4"): {"spills"},
        ("_unpadded", "BM=64 BN=64 warps=4"): {"narrow"},
        ("_unpadded", "BM=128 BN=64 warps=8"): {"narrow"},
    }


@pytest.mark.full
def test_a_cast_that_inductor_generates_keeps_the_bounds(tmp_path: Path) -> None:
    """It writes both layouts at once, with each of its block sizes. The scale is exact, too."""
    found = defaultdict(list)
    for kernel in compiled(tmp_path, "90", "inductor"):
        assert kernel["traffic"]["bytes"]
        found[kernel["case"]].append(broken(kernel))
        if kernel["case"] == "cast":  # the conversion is not by way of fp16, as on an Ada
            assert set(re.findall(r"cvt\.\w+\.\w*\.?e4m3x2\.\w+", kernel["assembly"])) == {
                "cvt.rn.satfinite.e4m3x2.f32"
            }
    assert found["cast"] == [set()] * 4
    ((*bounds,),) = found["scale"]
    assert {*bounds} <= {"narrow", "issue"}  # it moves two numbers


@pytest.mark.full
def test_kernels_compile_for_blackwell(tmp_path: Path) -> None:
    for kernel in compiled(tmp_path, "100", "first"):
        bounds = broken(kernel) - {"blocks", "conflicts", "issue", "shared"}
        assert bounds <= ({"narrow"} if kernel["kernel"] in FEW else set()), kernel["kernel"]


@pytest.mark.full
def test_kernels_compile_for_amd(tmp_path: Path) -> None:
    for kernel in compiled(tmp_path, "gfx942", "first"):
        assert has_relaxed_atomics(kernel), kernel["kernel"]
        assert not kernel["spilled"], kernel["kernel"]
    (ordered, *_) = compiled(tmp_path, "gfx942", "first", "former")
    assert ordered["kernel"] == "_ordered_amax"
    assert not has_relaxed_atomics(ordered)


PTX = """
.visible .entry some(.param .u64 some_param_0, .param .u32 some_param_1)
.reqntid 64
{{
	mov.u32 	%r1, %tid.x;
	mul.lo.s32 	%r2, %r1, {stride};
	ld.param.b64 	%rd1, [some_param_0];
	ld.param.b32 	%r6, [some_param_1];
	mul.wide.u32 	%rd2, %r1, 16;
	add.s64 	%rd3, %rd1, %rd2;
	mov.b32 	%r3, 0;
$L__BB0_1:                              // =>This Inner Loop Header: Depth=1
	setp.lt.u32 	%p1, %r1, 32;
	@%p1 ld.global.v4.b32 {{ %r8, %r9, %r10, %r11 }}, [ %rd3 + 0 ];
	st.shared.b32 [ %r2 + 4 ], %r8;
	add.s32 	%r3, %r3, 1;
	setp.lt.s32 	%p2, %r3, %r6;
	@%p2 bra 	$L__BB0_1;
	st.global.b8 [ %rd1 + 0 ], {{ %rs1 }};
	ret;
}}
"""


@pytest.mark.parametrize(("stride", "ways"), [(4, 1), (8, 2), (128, 32), (132, 1), (0, 1)])
def test_what_an_instance_moves(stride: int, ways: int) -> None:
    """Three rounds: 32 threads load 16 bytes each, two warps store words with a stride."""
    traffic = Instance(PTX.format(stride=stride), [4096, 3]).run()
    assert (traffic.bytes, traffic.narrow_bytes) == (3 * 32 * 16 + 64, 64)
    assert (traffic.wavefronts, traffic.free_wavefronts) == (3 * 2 * ways, 3 * 2)
    assert (traffic.rounds, traffic.unknown) == ([3], 0)


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
