"""What is tried on a GPU, tried here: on CPUs, in Triton's interpreter, and on a stub of a device."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from fp8_dist.kernels import CustomOp
from fp8_dist.kernels.cuda.triton import casts
from fp8_dist.kernels.cuda.triton.launch import Tuned
from fp8_dist.kernels.cuda.triton.rounding import indices, store_tile
from scripts.bench import gpu_operators, gpu_smoke, gpu_smoke_run
from scripts.bench.gpu_operators import operator_calls, tuned_kernels

ROOT = Path(__file__).resolve().parents[2]
rehearses = pytest.mark.skipif(
    torch.version.cuda is not None, reason="a build of torch for CUDA looks for its driver"
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy: x / 0, NaN


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_operators, "SHAPES", {False: (48, 256), True: (37, 131)})


@pytest.fixture
def tried(capsys: pytest.CaptureFixture[str]) -> Any:
    """`tried(part, *options)`: what a part finds on the CPU, by the name of the case."""

    def run(part: str, *options: str, status: int = 0) -> dict[str, str]:
        assert gpu_smoke.main([part, "--device", "cpu", *options]) == status
        lines = [line.split(": ", 2) for line in capsys.readouterr().out.splitlines()]
        assert all(line[0] == part for line in lines)
        return {name: "".join(rest) for _, name, *rest in lines}

    return run


def launches_of_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[Tuned]]:
    """The kernels of each call, of which none runs."""
    kernels: set[Tuned] = set()
    monkeypatch.setattr(Tuned, "__call__", lambda tuned, *_, **__: kernels.add(tuned))
    found = {}
    for name, (op, args, kwargs) in operator_calls("cpu", odd=False).items():
        kernels.clear()
        op.implementations["cuda"](*args, **kwargs)
        found[name] = {*kernels}
    return found


def test_the_calls_reach_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launches_of_calls(monkeypatch)
    assert all(found.values())
    assert set.union(*found.values()) == {*tuned_kernels()}
    assert len(tuned_kernels()) > 15


def test_the_calls_are_of_every_operator() -> None:
    modules = [m for name, m in sys.modules.items() if name.startswith("fp8_dist.")]
    ops = {each for m in modules for each in vars(m).values() if isinstance(each, CustomOp)}
    of = {op: op.implementations.get("cuda") for op in ops}
    in_triton = {op for op, run in of.items() if ".cuda.triton." in getattr(run, "__module__", "")}
    assert {op for op, *_ in operator_calls("cpu", odd=True).values()} == in_triton


def test_every_choice_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name, _ in gpu_smoke_run.kernel_cases("cpu")]
    assert len({*names}) == len(names)
    for name, kernels in launches_of_calls(monkeypatch).items():
        most = max(len(each.configs) for each in kernels)
        for kind in ("aligned", "odd"):
            tried = [each for each in names if each.startswith(f"{name}, {kind}, ")]
            assert tried == [f"{name}, {kind}, choice {i}" for i in range(most)] + [
                f"{name}, {kind}, tuned"
            ]


def test_processes_share_the_calls(tried: Any) -> None:
    only = "kernels", "--only", "scaling_from"
    every = tried(*only)
    parts = [tried(*only, "--part", f"{i}/3") for i in (1, 2, 3)]
    assert len(every) == sum(map(len, parts)) == 8
    assert set.union(*map(set, parts)) == {*every}
    for part in parts:  # has all cases of a call
        assert {name.rpartition(", ")[0] + ", tuned" for name in part} <= part.keys()
    with pytest.raises(SystemExit):
        tried("kernels", "--part", "4/3")


def test_kernels_have_the_bits_of_the_portable_code(tried: Any) -> None:
    found = tried(
        "kernels", "--only", "reblock row-major, odd", "cast_blocks 32x32", "amax_of_each, odd"
    )
    assert found["reblock row-major, odd, choice 0"] == "_reblock BM=64 BN=64 warps=2"


@triton.jit
def _without_zeros(x, out, M, K, MULTIPLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    # Large tiles write no zeros behind a matrix.
    i, j = indices(tl.program_id(0), BM), indices(tl.program_id(1), BN)
    matrix, columns = tl.program_id(2).to(tl.int64) * K, tl.cdiv(M, MULTIPLE) * MULTIPLE
    mask = (i[:, None] < M) & (j[None, :] < K)
    data = tl.load(x + matrix * M + i[:, None] * K + j[None, :], mask=mask, other=0)
    out += matrix * columns
    if BM < 128:
        store_tile(out, tl.trans(data), j, i, K, columns)
    else:
        places = out + j[:, None] * columns + i[None, :]
        tl.store(places, tl.trans(data), mask=tl.trans(mask))


def test_a_wrong_choice_is_found(tried: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts._transpose, "kernel", _without_zeros)
    found = tried("kernels", "--only", "transposed_copy,", status=3)
    wrong = {name: text for name, text in found.items() if "FAILED" in text}
    assert [*wrong] == ["transposed_copy, odd, choice 1"]
    assert wrong["transposed_copy, odd, choice 1"].endswith(
        "AssertionError: result 0: 1441 of 6288 elements differ, the first at (0, 37): "
        "nan instead of 0.0"
    )


def test_differences_are_named() -> None:
    x = torch.tensor([[1.0, torch.nan, 3.0], [4.0, -0.0, 6.0]])
    y = torch.tensor([[1.0, -torch.nan, 3.0], [4.0, 0.0, 7.0]])
    assert gpu_smoke_run.difference(x, x.clone()) == ""
    assert gpu_smoke_run.difference(x[0], y[0]) == ""
    assert (
        gpu_smoke_run.difference(x, y)
        == "2 of 6 elements differ, the first at (1, 1): -0.0 instead of 0.0"
    )
    assert gpu_smoke_run.difference(x[0], x) == "float32 (3,) instead of float32 (2, 3)"


def test_compiled_copies(tried: Any) -> None:
    assert len(tried("inductor", "--only", "64 x 48, bfloat16")) == 4


class Kernel(CachingAutotuner):
    """A kernel with launch configs, of which the last one writes a NaN."""

    def __init__(self) -> None:
        self.launchers: list[Any] = [lambda x: x, lambda x: x, lambda x: x.fill_(0x7F)]

    def run(self, x: torch.Tensor) -> None:
        if len(self.launchers) > 1:
            self.autotune_to_one_config(x)
        (launcher,) = self.launchers
        launcher(x.view(torch.uint8)[3, 5])


def test_a_wrong_launch_config_is_found(tried: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()

    def compiled(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        made = gpu_smoke_run.casts(*args, **kwargs)
        kernel.run(made["transposed"])
        return made

    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled)
    found = tried("inductor", "--only", "64 x 48, bfloat16 to e5m2, saturated", status=3)
    (text,) = found.values()
    assert "config 2, transposed: 1 of 3072 elements differ, the first at (3, 5): nan" in text


@rehearses
def test_a_rehearsal() -> None:
    """On a stub of a device, where all is well; kernels are compiled for it."""
    only = ["--only", "transposed_copy, ", "64 x 48, bfloat16"]
    code = f"""
from scripts.bench import gpu_smoke
assert [gpu_smoke.main([part, *{only}]) for part in ("kernels", "inductor")] == [0, 0]
"""
    done = subprocess.run(
        [sys.executable, "-m", "fake_cuda.rehearsal", "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("kernels", "inductor"))]
    assert len(lines) == 2 * 6 + 4
    assert any("odd, choice 1, side stream: _transpose BM=" in line for line in lines)
