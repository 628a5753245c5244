"""Casts in graphs on GPUs: Inductor's kernels, which Triton's interpreter runs on the CPU.

The interpreter's divisions are exact; a GPU's are only in fp64.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fake_cuda.inductor import executed
from fake_cuda.process import FakeCudaProcess
from inductor_kernels import code_of_product, loaded
from reference import same_bits
from torch._inductor.async_compile import AsyncCompile

from fp8_dist import device
from fp8_dist.kernels.quantization import cast_copies
from fp8_dist.scaling import CastPlan, Dense, dense, operators

interpreter = pytest.importorskip("triton.runtime.interpreter")

# torch's dtypes, and integers of their sizes, by Triton's names.
DTYPES = {
    "bf16": (torch.bfloat16, torch.int16),
    "fp32": (torch.float32, torch.int32),
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8),
    "fp8e5": (torch.float8_e5m2, torch.uint8),
}
SIZES = (16, 48)


def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Replace a conversion of the interpreter, which does not round as a GPU does."""
    (given, _), (wanted, integer) = DTYPES[str(source)], DTYPES[str(target)]
    bits = torch.from_numpy(values.copy()).view(given).to(wanted).view(integer).numpy()
    return bits.view(f"uint{8 * integer.itemsize}")


def run_once(kernel: Any, *args: Any, stream: int) -> None:
    """Run one instance of a kernel, which covers all elements."""
    blocks = {name: 64 for name in ("XBLOCK", "YBLOCK", "R0_BLOCK") if name in kernel.arg_names}
    kernel[(1, 1)](*args, **blocks)


@pytest.fixture
def interpret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[torch.Tensor]]:
    """`interpret(code, *args)` runs the code of a graph on tensors on the CPU."""

    def interpreted(code: str, *args: torch.Tensor) -> list[torch.Tensor]:
        names = executed(code)
        names["empty_strided_cuda"] = lambda size, stride, dtype: torch.empty_strided(
            size, stride, dtype=dtype
        )
        return list(names["call"](list(args)))

    def make(self: AsyncCompile, name: str, source: str, device_str: str) -> SimpleNamespace:
        kernel = loaded(tmp_path, name, source)
        return SimpleNamespace(run=lambda *args, stream: run_once(kernel, *args, stream=stream))

    monkeypatch.setattr(AsyncCompile, "triton", make)
    monkeypatch.setattr(AsyncCompile, "wait", lambda self, names: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "_DeviceGuard", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(interpreter, "_convert_float", converted)
    return interpreted


@pytest.mark.parametrize(
    ("high", "dtype"),
    [
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e5m2),
        (torch.float32, torch.float8_e4m3fn),
    ],
)
def test_bits_are_those_of_eager_code(
    high: torch.dtype,
    dtype: torch.dtype,
    fake_cuda: FakeCudaProcess,
    interpret: Callable[..., list[torch.Tensor]],
) -> None:
    """The product that is cast stays in registers, in fp32. It is rounded as if it were stored."""
    code = fake_cuda.run(code_of_product, SIZES, high, dtype)
    allocated = re.findall(r"= empty_strided_cuda\((.*), (torch\.\w+)\)", code)
    assert len(allocated) == 3
    assert {each for size, each in allocated if size != "(), ()"} == {str(dtype)}
    for value in (1.0, 0.0, 1e-13, 6e4, torch.inf, torch.nan):
        a, b = (torch.randn(SIZES).to(high) for _ in range(2))
        a[3, 5] = value
        known = torch.rand(())  # an amax that some values exceed
        expected = cast_copies(a * b, [known], dtype, False, [0, 0], [False, True], saturate=True)
        for found, each in zip(interpret(code, a, b, known), expected, strict=True):
            wide, other = found.float(), each.float()
            assert wide.isnan().equal(other.isnan())
            assert same_bits(wide.nan_to_num(), other.nan_to_num())


# By Triton's release: its two releases of ptxas, and the first architecture that takes the second.
TRITON = {
    "3.6": ("12.8", "12.9", 100),
    "3.7": ("12.8", "13.1", 100),
    "3.8": ("12.9", "13.3", 100),
    "3.9": ("12.9", "13.4", 90),
}
COMPILER = "triton.backends.nvidia.compiler"


def casts(
    a: torch.Tensor, b: torch.Tensor, known: torch.Tensor, dtype: torch.dtype
) -> list[torch.Tensor]:
    """One copy of a product, and two of another one."""
    found = []
    for x, plan in ((a * b, (False,)), (a + b, (False, True))):
        copies = CastPlan((Dense(dtype),), (0,) * len(plan), plan)
        _, data, _ = operators.cast_in_graph(x, copies, [(known,)], True, False, None)
        found += data
    return found


def cast_operators(triton: str | None, capability: tuple[int, int]) -> int:
    """How many casts a graph leaves to the library, with a release of Triton."""

    def compiler(name: str) -> SimpleNamespace:
        assert name == COMPILER
        if triton is None:  # it is not installed
            raise ImportError
        old, new, first = TRITON[triton]
        return SimpleNamespace(
            get_ptxas=lambda arch: SimpleNamespace(version=new if arch >= first else old)
        )

    device._ptxas_release.cache_clear()
    with (
        patch.object(device, "import_module", compiler),
        patch.object(dense, "stores_transposed", device.stores_transposed),
        patch.object(torch.cuda, "get_device_capability", lambda device=None: capability),
    ):
        torch._dynamo.reset()
        code = code_of_product(SIZES, torch.bfloat16, torch.float8_e4m3fn, casts)
        device._ptxas_release.cache_clear()
    return code.count("torch.ops.fp8_dist.cast.default(")


@pytest.mark.parametrize(
    ("triton", "capability", "operators"),
    [
        ("3.6", (9, 0), 1),
        ("3.7", (9, 0), 1),
        ("3.8", (9, 0), 1),
        ("3.9", (9, 0), 0),
        ("3.6", (10, 0), 1),
        ("3.7", (10, 0), 0),
        (None, (9, 0), 1),
    ],
)
def test_no_kernel_of_an_old_ptxas_stores_a_copy_and_its_transpose(
    triton: str | None, capability: tuple[int, int], operators: int, fake_cuda: FakeCudaProcess
) -> None:
    """It would confuse their bytes, on a GPU (Note [Four bytes at a time])."""
    assert fake_cuda.run(cast_operators, triton, capability) == operators


def test_the_ptxas_of_the_triton_that_is_installed() -> None:
    compiler = pytest.importorskip(COMPILER)
    for arch in (90, 100):
        release = int(compiler.get_ptxas(arch).version.partition(".")[0])
        assert device._ptxas_release(arch) == release > 11
