"""On a GPU: each Triton kernel against the portable code, and the casts that Inductor generates.

Tests that need no GPU check that these comparisons leave out no kernel and find differences.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, lru_cache
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from implementations import DEVICE
from operator_calls import (
    BF16,
    BOTH,
    E4M3,
    E5M2,
    FP16,
    FP32,
    Call,
    Calls,
    moved,
    operator_calls,
    triton_kernels,
)
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.testing._internal.common_utils import DeterministicGuard
from torch.utils._pytree import tree_leaves

from fp8_dist.device import short_name, stores_transposed
from fp8_dist.kernels import quantization, scale
from fp8_dist.kernels.cuda.triton.launch import Kernel
from fp8_dist.kernels.custom_op import CustomOp
from fp8_dist.kernels.scale import INTEGERS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy: x / 0, NaN

ROOT = Path(__file__).resolve().parents[2]
# Several tiles in both directions. No tile divides the odd sizes.
SIZES = {"aligned": (320, 2560), "odd": (331, 2569)}
SMALL = {"aligned": (48, 256), "odd": (37, 131)}  # for Triton's interpreter
NAMES = [*operator_calls(*SMALL["odd"])]
Named = dict[str, Tensor]


def comparable(x: Tensor) -> Tensor:
    """The bits as integers, where all NaNs become equal."""
    bits = x.view(INTEGERS[x.itemsize])
    return bits.masked_fill(x.float().isnan(), -1) if x.is_floating_point() else bits


def difference(actual: Tensor, expected: Tensor) -> str:
    """Describe how a tensor differs from the expected one; empty if the bits are equal."""
    kinds = [f"{short_name(x.dtype)} {tuple(x.shape)}" for x in (actual, expected)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} instead of {kinds[1]}"
    mine, theirs = comparable(actual), comparable(expected.to(actual.device))
    if torch.equal(mine, theirs):
        return ""
    places = (mine != theirs).nonzero()
    first = tuple(places[0].tolist())
    values = " instead of ".join(str(x[first].float().item()) for x in (actual, expected))
    return f"{len(places)} of {actual.numel()} elements differ, the first at {first}: {values}"


def check_same(actual: Named, expected: Named, where: str = "") -> None:
    """Raise an error that names the tensors that differ, and says how."""
    assert actual.keys() == expected.keys(), f"{[*actual]} instead of {[*expected]}"
    differences = {name: difference(actual[name], expected[name]) for name in actual}
    problems = [f"{where}{name}: {problem}" for name, problem in differences.items() if problem]
    assert not problems, "; ".join(problems)


def test_differences_are_named() -> None:
    x = torch.tensor([[1.0, torch.nan, 3.0], [4.0, -0.0, 6.0]])
    y = torch.tensor([[1.0, -torch.nan, 3.0], [4.0, 0.0, 7.0]])
    assert difference(x[0], y[0]) == ""
    text = "2 of 6 elements differ, the first at (1, 1): -0.0 instead of 0.0"
    assert difference(x, y) == text
    assert difference(x[0], x) == "float32 (3,) instead of float32 (2, 3)"


# The library's kernels


def outputs(run: Callable[..., Any], call: Call) -> Named:
    """Run a function on copies of a call's arguments; return its results and these arguments."""
    _, args, kwargs = moved(call)
    trees = {"result": run(*args, **kwargs), "argument": args}
    leaves = {f"{name} {i}": x for name in trees for i, x in enumerate(tree_leaves(trees[name]))}
    return {name: x for name, x in leaves.items() if isinstance(x, Tensor)}


def portable(call: Call) -> Named:
    """The outputs of the portable code, also for operators that it calls."""

    def run(op: CustomOp[..., Any], *args: Any, **kwargs: Any) -> Any:
        return op.portable(*args, **kwargs)

    with patch.object(CustomOp, "__call__", run):
        return outputs(call.op.portable, call)


def launched(call: Call) -> Named:
    """The outputs of the Triton kernels. Unwritten elements are NaN, or the largest integer."""
    with DeterministicGuard(True, warn_only=True):
        return outputs(call.op.implementations["cuda"], call)


@contextmanager
def side_stream() -> Iterator[None]:
    """Queue work on a new stream, ordered with earlier and later work on the current stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def check_launches(call: Call, expected: Named, aside: bool = False) -> None:
    """Check the call that compiles the kernels, and the next one, which launches them directly."""
    for kernel in triton_kernels():
        kernel._compiled.clear()
    for n in range(2):
        with side_stream() if aside else nullcontext():
            actual = launched(call)
        check_same(actual, expected, f"call {n}, ")


@cache
def calls(sizes: str) -> Calls:
    return operator_calls(*SIZES[sizes])


@lru_cache(1)
def on_gpu(sizes: str, name: str) -> tuple[Call, Named]:
    """A call on the GPU, and what the portable code gives there; kept for the next test."""
    call = moved(calls(sizes)[name], "cuda")
    return call, portable(call)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["launched", "side stream", "portable"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", SIZES)
def test_bits_of_an_operator(sizes: str, name: str, how: str) -> None:
    """Kernels have the bits of the portable code on the GPU, which has those of the CPU."""
    call, expected = on_gpu(sizes, name)
    if how == "portable":
        check_same(expected, portable(calls(sizes)[name]))
    else:
        check_launches(call, expected, aside=how == "side stream")


def test_the_calls_reach_every_operator_and_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: set[Kernel] = set()
    monkeypatch.setattr(Kernel, "__call__", lambda kernel, *_, **__: reached.add(kernel))
    monkeypatch.setattr(Kernel, "repeat", lambda kernel, *_, **__: reached.add(kernel))
    calls = operator_calls(*SMALL["aligned"])
    for op, args, kwargs in (moved(call, DEVICE) for call in calls.values()):
        op.implementations["cuda"](*args, **kwargs)
    assert reached == {*triton_kernels()}
    assert len(reached) > 15
    modules = [m for name, m in sys.modules.items() if name.startswith("fp8_dist.")]
    ops = {op for m in modules for op in vars(m).values() if isinstance(op, CustomOp)}
    on_gpus = {op: op.implementations.get("cuda") for op in ops}
    fused = {o for o, run in on_gpus.items() if ".cuda.triton." in getattr(run, "__module__", "")}
    assert {call.op for call in calls.values()} == fused
    assert [*calls] == NAMES


def test_a_wrong_launch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes in SMALL.values():
        chosen = [c for name, c in operator_calls(*sizes).items() if name.startswith("scaling")]
        assert len(chosen) == 2
        for call in (moved(call, DEVICE) for call in chosen):
            check_launches(call, portable(call))
    right, launches = call.op.implementations["cuda"], count()

    def wrong(*args: Any) -> tuple[Tensor, ...]:
        results = right(*args)
        if next(launches) == 1:
            results[1].fill_(torch.nan)
        return results

    monkeypatch.setitem(call.op.implementations, "cuda", wrong)
    with pytest.raises(
        AssertionError, match=r"call 1, result 1: 36 of 37 elements differ, .*: nan"
    ):
        check_launches(call, portable(call))


# Inductor's casts

SHAPES = ((64, 48), (1024, 768), (16, 4096), (4096, 4096), (8192, 14336))


def casts(x: Tensor, y: Tensor, dtype: torch.dtype, saturates: bool, fused: bool) -> Named:
    """The float8 copies of a product, by fusible operators of graphs, or by the library's kernels.

    With ``saturates`` the amax leaves out the first row, whose values may then saturate.
    """
    high = x * y
    largest = high[1:] if saturates else high
    if fused and stores_transposed(x.device):
        known = scale.fusible_amax(largest)
        copies = quantization.fusible_copies(high, known, dtype, BOTH, saturate=saturates)
    else:
        known, of = scale.amax(largest), [0, 0]
        copies = quantization.cast_copies(high, [known], dtype, False, of, BOTH, saturate=saturates)
    return {"scale": copies[0], "rows": copies[1], "transposed": copies[2]}


@contextmanager
def launchers() -> Iterator[list[tuple[CachingAutotuner, list[Any]]]]:
    """Make Inductor's kernels use their first launch config; yield kernels with all configs."""
    kernels: list[tuple[CachingAutotuner, list[Any]]] = []

    def first(kernel: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
        kernels.append((kernel, kernel.launchers))
        kernel.launchers = kernel.launchers[:1]

    with patch.object(CachingAutotuner, "autotune_to_one_config", first):
        yield kernels


def check_casts(
    shape: tuple[int, int], high: torch.dtype, dtype: torch.dtype, saturates: bool, device: str
) -> int:
    """Check the copies that compiled code writes in each launch config; return how many it has."""
    x, y = (torch.randn(shape, device=device).to(high) for _ in range(2))
    if saturates:
        x[0, :5] = torch.tensor([math.nan, math.inf, -math.inf, 1e3, -1e3])
    expected, index = casts(x, y, dtype, saturates, fused=False), 0
    options = {"max_autotune_pointwise": True, "autotune_local_cache": False}
    compiled = torch.compile(casts, fullgraph=True, dynamic=False, options=options)
    with launchers() as kernels:
        while index < max((len(configs) for _, configs in kernels), default=1):
            for kernel, configs in kernels:
                kernel.launchers = [configs[index % len(configs)]]
                kernel._cached_launcher = None  # from torch 2.13 on, that of the first run
            check_same(compiled(x, y, dtype, saturates, fused=True), expected, f"config {index}, ")
            index += 1
    return index


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E5M2, E4M3], ids=str)
@pytest.mark.parametrize("high", [BF16, FP32, FP16], ids=str)
@pytest.mark.parametrize("saturates", BOTH, ids=["in range", "saturated"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_casts_of_inductor(
    shape: tuple[int, int], saturates: bool, high: torch.dtype, dtype: torch.dtype
) -> None:
    assert check_casts(shape, high, dtype, saturates, "cuda") > 1


class FakeKernel(CachingAutotuner):
    """A kernel whose last launch config writes a NaN. It keeps the launcher of its first run."""

    def __init__(self) -> None:
        self.launchers: list[Any] = [lambda x: x, lambda x: x, lambda x: x.fill_(0x7F)]
        self._cached_launcher = None

    def run(self, x: Tensor) -> None:
        if self._cached_launcher is None:
            if len(self.launchers) > 1:
                self.autotune_to_one_config(x)
            (self._cached_launcher,) = self.launchers
        self._cached_launcher(x.view(torch.uint8)[3, 5])


def test_a_wrong_launch_config_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel()

    def compiled(*args: Any, **kwargs: Any) -> Named:
        copies = casts(*args, **kwargs)
        kernel.run(copies["transposed"])
        return copies

    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled)
    text = r"config 2, transposed: 1 of 3072 elements differ, the first at \(3, 5\): nan"
    with pytest.raises(AssertionError, match=text):
        check_casts((64, 48), BF16, E5M2, True, "cpu")


@pytest.mark.full
@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for CUDA looks for its driver")
def test_a_rehearsal() -> None:
    """The tests run on a fake device, which computes nothing; values are not compared."""
    code = """
from test_gpu_kernels import *
for how in ("launched", "side stream", "portable"):
    test_bits_of_an_operator("odd", "transposed_copy", how)
for saturates in BOTH:
    assert check_casts(SHAPES[0], BF16, E5M2, saturates, "cuda") == 1
"""
    own = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support:{ROOT}/tests/gpu"}
    command = [sys.executable, "-m", "fake_cuda.rehearsal", "-c", code]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
