"""Compile Triton kernels for some architectures, with launch arguments, and print the results.

    python tests/support/compile_kernels.py 90 100 gfx942

Prints JSON: a list of objects with the keys of :class:`Compiled`. For the first architecture, each
kernel is compiled for all kinds of arguments, and Inductor's cast kernels as well. For the others, each kernel is compiled once. Needs no GPU. If KERNEL is in
the environment, only the kernels of that operator are compiled.
"""

import json
import os
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
from operator_calls import operator_calls
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fp8_dist.kernels.cuda.triton import launch

M, K = 8192, 4096
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass
class Compiled:
    """A kernel for some arguments.

    Attributes:
        architecture: the target.
        kernel: the name.
        sizes: the block sizes.
        warps: the number of warps of an instance.
        assembly: PTX, or AMD's assembly.
        shared: bytes of shared memory per instance.
        registers: registers per thread.
        spilled: bytes of spilled registers per thread.
    """

    architecture: str
    kernel: str
    sizes: str
    warps: int
    assembly: str
    shared: int
    registers: int
    spilled: int


class Driver:
    """A stand-in for the driver of a GPU, with what compilers ask for."""

    def __init__(self, architecture: str, index: int) -> None:
        self.amd = architecture.startswith("gfx")
        number = architecture if self.amd else int(architecture)
        self.target = GPUTarget(*(("hip", number, 64) if self.amd else ("cuda", number, 32)))
        self.index = index  # Triton caches compiled kernels per device

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.index

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """A replacement of launches that compiles kernels instead.

    ``every``: compile for each combination of constants, dtypes and optional arguments. Otherwise
    compile kernels once.
    """

    def __init__(self, architecture: str, index: int, every: bool) -> None:
        self.architecture = architecture
        self.driver = Driver(architecture, index)
        self.every = every
        self.seen: dict[launch.Kernel, set[Any]] = {}
        self.results: list[Compiled] = []

    def __call__(self, kernel: launch.Kernel, grid: Any, *args: Any, **constants: Any) -> None:
        """Compile a kernel for the given arguments."""
        leaves = tree_leaves(args, lambda each: each is None)
        dtypes = [getattr(each, "dtype", each is None) for each in leaves]
        kind = (*constants.values(), *dtypes) if self.every else ()
        seen = self.seen.setdefault(kernel, set())
        if kind in seen:
            return
        seen.add(kind)
        chosen = kernel.options | constants
        found = kernel.kernel.run(*args, grid=(1,), warmup=True, **chosen)
        sizes = " ".join(f"{name}={chosen[name]}" for name in kernel.blocks)
        self.note(found, kernel.kernel.__name__, f"{sizes} warps={chosen['num_warps']}")

    def note(self, found: Any, kernel: str, sizes: str) -> None:
        """Add a compiled kernel."""
        if self.driver.amd:
            assembly = found.asm["amdgcn"]
            names = ("vgpr_count", "private_segment_fixed_size")
            usage = [int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1]) for name in names]  # type: ignore[index]
        else:
            assembly = found.asm["ptx"]
            registers, stack, local = used(found.asm["cubin"])
            usage = [registers, stack + local]
        labels = self.architecture, kernel, sizes, found.metadata.num_warps
        self.results.append(Compiled(*labels, assembly, found.metadata.shared, *usage))


def used(cubin: bytes) -> list[int]:
    """Return the registers, stack bytes and local bytes per thread of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        show = [_CUOBJDUMP, "-res-usage", file.name]
        text = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text)
    return [*map(int, usage.groups())]  # type: ignore[union-attr]


def compile_inductors(compiler: Compiler) -> None:
    """Compile Inductor's kernels for the casts of a product, with some of its block sizes."""
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

    with (
        patch.object(launch.Kernel, "__call__", lambda *args, **rest: compiler(*args, **rest)),
        patch.object(launch, "rounds_to", lambda dtype, device: not compiler.driver.amd),
    ):
        # (The kernels are the same for any odd number of rows.)
        for name, (op, args, kwargs) in operator_calls(95, 4096).items():
            is_chosen = os.environ.get("KERNEL") in (None, op.__name__)
            if is_chosen and "float16" not in name.replace("bfloat16", ""):
                op.implementations["cuda"](*args, **kwargs)
    if not index and "KERNEL" not in os.environ:
        compile_inductors(compiler)
    return compiler.results


if __name__ == "__main__":
    found = [each for index, name in enumerate(sys.argv[1:]) for each in compiled(name, index)]
    print(json.dumps([asdict(each) for each in found]))
