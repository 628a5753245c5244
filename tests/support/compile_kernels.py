"""Compile Triton kernels for architectures, as they would be launched, and print the results.

    python tests/support/compile_kernels.py 90 100 gfx942

JSON, one object for each compiled kernel, with the keys of :class:`Compiled`: for the first
architecture each kernel with each choice of block sizes for all kinds of arguments, and what
Inductor casts with; for the others each kernel once. It needs no GPU.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from fake_cuda.process import FakeCudaProcess
from inductor_kernels import code_of_product, loaded, sources
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fp8_dist import kernels
from fp8_dist.kernels import CustomOp, cuda, encoding, gemm
from fp8_dist.kernels.cuda.triton import launch
from fp8_dist.kernels.folding import fold_gradient

assert cuda.HAS_TRITON

M, K = 8192, 4096
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass
class Compiled:
    """A kernel for one choice of block sizes.

    Attributes:
        architecture: what it is for.
        kernel: its name.
        choice: the block sizes.
        warps: of an instance.
        assembly: PTX, or AMD's assembly.
        shared: bytes of shared memory of an instance.
        registers: of a thread.
        spilled: bytes of a thread's memory for registers that do not fit.
    """

    architecture: str
    kernel: str
    choice: str
    warps: int
    assembly: str
    shared: int
    registers: int
    spilled: int


class Driver:
    """What compilers ask the driver of a GPU that is not here."""

    def __init__(self, architecture: str, index: int) -> None:
        self.amd = architecture.startswith("gfx")
        number = architecture if self.amd else int(architecture)
        self.target = GPUTarget(*(("hip", number, 64) if self.amd else ("cuda", number, 32)))
        self.index = index  # Triton keeps what it compiled for a device

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.index

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Compiles what would be launched.

    ``every``: each choice of block sizes for all kinds of arguments, not each kernel once.
    """

    def __init__(self, architecture: str, index: int, every: bool) -> None:
        self.architecture = architecture
        self.driver = Driver(architecture, index)
        self.every = every
        self.seen: set[Any] = set()
        self.results: list[Compiled] = []

    def __call__(self, tuned: launch.Tuned, grid: Any, *args: Any, **constants: Any) -> None:
        """Compile a kernel for these arguments."""
        for config in tuned.configs[: None if self.every else 1]:
            chosen = config.all_kwargs() | {"enable_fp_fusion": False}
            if not self.every and tuned in self.seen:
                return
            self.seen.add(tuned)
            found = tuned.kernel.run(*args, grid=(1,), warmup=True, **constants, **chosen)
            sizes = " ".join(f"{name}={size}" for name, size in config.kwargs.items())
            self.note(found, tuned.kernel.__name__, f"{sizes} warps={config.num_warps}")

    def note(self, found: Any, kernel: str, choice: str) -> None:
        """Add a compiled kernel, unless Triton has found it again."""
        if found in self.seen:
            return
        self.seen.add(found)
        if self.driver.amd:
            assembly = found.asm["amdgcn"]
            names = ("vgpr_count", "private_segment_fixed_size")
            usage = [int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1]) for name in names]  # type: ignore[index]
        else:
            assembly = found.asm["ptx"]
            registers, stack, local = used(found.asm["cubin"])
            usage = [registers, stack + local]
        labels = self.architecture, kernel, choice, found.metadata.num_warps
        self.results.append(Compiled(*labels, assembly, found.metadata.shared, *usage))


def used(cubin: bytes) -> list[int]:
    """Return the registers of a thread, and the bytes of its stack and its memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        show = [_CUOBJDUMP, "-res-usage", file.name]
        text = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text)
    return [*map(int, usage.groups())]  # type: ignore[union-attr]


def call_all(run: Any) -> None:
    """Call every function, on tensors whose values don't matter."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    x = torch.empty(M, K, dtype=torch.bfloat16)
    rows, columns, one = torch.zeros(M, 1), torch.zeros(1, K), torch.zeros(())
    both = [False, True]
    for dims in (None, [0], [1]):
        run(kernels.amax, x, dims)
    run(kernels.amax, x.float())
    run(kernels.amaxes, x, ["row", "column"])
    run(kernels.amax_of_each, x, [x])
    run(kernels.amax_of_each, x, [x], True)
    run(kernels.scaling_from_amax, rows, e4m3)
    run(kernels.cast_copies, x, [one], e4m3, False, [0, 0], both)
    run(kernels.cast_copies, x, [one], e5m2, False, [0, 0], both)
    run(kernels.cast_copies, x, [one], e4m3, False, [0], [True])
    run(kernels.cast_copies, x.float(), [one], e4m3, False, [0], [False])
    run(kernels.cast_copies, x, [rows], e4m3, True, [0], [False])
    run(kernels.cast_copies, x, [rows, columns], e4m3, True, [0, 1], both)
    run(kernels.cast_copies, x, [columns], e4m3, False, [0, 0], both)
    run(kernels.quantize, x, columns, e4m3)
    run(kernels.cast_rows, x, e4m3, True, both)
    run(kernels.cast_rows, x, e4m3, True, [False])
    run(kernels.cast_and_measure, x, one, e4m3, True, both)
    run(fold_gradient, x, e4m3, columns.view(-1), rows.view(-1), True)
    numbers, data = run(kernels.cast_blocks, x, e4m3, (1, 128, 0, 0), None, [False])
    run(kernels.cast_blocks, x, e4m3, (1, 128, 0, 0), None, both)
    run(kernels.cast_blocks, x, e4m3, (128, 128, 0, 0), "ceil", both)
    run(kernels.quantize_blocks, x, numbers, e4m3, (1, 128, 0, 0))
    run(kernels.block_exponents, x, e4m3, (32, 32, 0, 0), "floor")
    run(kernels.reblock, data, numbers, (1, 128, 0, 0), 128, None, True)
    small, data32 = run(kernels.cast_blocks, x, e4m3, (1, 32, 0, 0), "ceil", [False])
    run(kernels.reblock, data32, small, (1, 32, 0, 0), 32, "ceil", True)
    run(gemm.gemm_scales, numbers, numbers, 4)
    run(gemm.dequantize_blocks, data, numbers, (1, 128, 0, 0), torch.bfloat16)
    codes, each = run(encoding.encode_float8, x, 1)
    run(encoding.encode_float8, x, -1)
    codes, each = codes.view(2, -1, K), each.view(2, -1, K // 128)
    half = M // 2
    run(encoding.sum_of_rows, codes, each, x[:half], 1)
    run(encoding.sum_of_rows, x.view(2, -1, K), None, x[:half].float(), 1)
    run(kernels.transposed_copy, data)
    # Packed sequences have any number of tokens.
    some = x[1:]
    run(kernels.cast_copies, some, [one], e4m3, False, [0, 0], both)
    run(kernels.cast_copies, some, [rows[1:], columns], e4m3, True, [0, 1], both)
    run(fold_gradient, some, e4m3, columns.view(-1), rows[1:].view(-1), True)
    run(kernels.reblock, data[1:], numbers[1:], (1, 128, 0, 0), 128, None, True)
    run(kernels.transposed_copy, data[1:])
    source = torch.arange(M)
    run(kernels.transposed_groups, data, source)
    s, group = columns.repeat(2, 1), source // half
    run(kernels.fold_groups, data, rows, s, rows.view(-1), group, 2, source)


def compile_inductors(compiler: Compiler) -> None:
    """Compile the kernels that cast a product, for block sizes among which Inductor chooses."""
    e4m3, bf16 = torch.float8_e4m3fn, torch.bfloat16
    with FakeCudaProcess() as process:
        code = process.run(code_of_product, (M, K), bf16, e4m3)
    a, b = (torch.empty(M, K, dtype=bf16) for _ in range(2))
    copies = torch.empty(K, M, dtype=e4m3), torch.empty(M, K, dtype=e4m3)
    one, scale = torch.zeros(()), torch.zeros(())
    with tempfile.TemporaryDirectory() as folder:
        for name, source in sources(code).items():
            kernel = loaded(Path(folder), name, source)
            casts = "YBLOCK" in kernel.arg_names
            args = (a, b, one, *copies, M, K) if casts else (one, scale, 1)
            for y, x, warps in ((32, 32, 4), (16, 256, 8)) if casts else ((1, 1, 1),):
                sizes = {"YBLOCK": y, "XBLOCK": x} if casts else {"XBLOCK": x}
                found = kernel.run(*args, grid=(1,), warmup=True, num_warps=warps, **sizes)
                compiler.note(found, "inductor's cast" if casts else "inductor's scale", str(sizes))


def compiled(architecture: str, index: int) -> list[Compiled]:
    """Compile for an architecture."""
    compiler = Compiler(architecture, index, every=not index)
    driver.set_active(compiler.driver)
    launch.float8_constants.cache_clear()

    def run(op: CustomOp[..., Any], *args: Any) -> Any:
        """What is registered for GPUs, on tensors on the CPU."""
        return op.implementations["cuda"](*args)

    with (
        patch.object(launch.Tuned, "__call__", lambda *args, **rest: compiler(*args, **rest)),
        patch.object(launch, "rounds_to", lambda dtype, device: not compiler.driver.amd),
    ):
        call_all(run)
    if not index:
        compile_inductors(compiler)
    return compiler.results


if __name__ == "__main__":
    found = [each for index, name in enumerate(sys.argv[1:]) for each in compiled(name, index)]
    print(json.dumps([asdict(each) for each in found]))
