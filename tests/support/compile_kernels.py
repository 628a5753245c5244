"""Compile Triton kernels for some architectures, with launch arguments, and print the results.

    python tests/support/compile_kernels.py 90 89 100,103,120 gfx942

Prints JSON: a list of objects with the keys of :class:`Compiled`. For NVIDIA's architectures, each
kernel is compiled for all kinds of arguments; for AMD's, once. For the first architecture,
Inductor's cast kernels are compiled as well. Needs no GPU. If KERNEL is in the environment, only
the kernels of that operator are compiled.

Triton makes the same PTX for the architectures of one argument. It is made for the first one, and
assembled for each. (Hopper's differs from Blackwell's.)
"""

import gc
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
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.backends.compiler import GPUTarget, Language
from triton.compiler.compiler import make_backend
from triton.runtime import driver

from fp8_dist import device
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

    def capability(self, device: object) -> tuple[int, int]:
        """In place of ``fp8_dist.device._nvidia_capability``."""
        return (0, 0) if self.amd else divmod(self.target.arch, 10)


class Compiler:
    """A replacement of launches that compiles kernels instead.

    Args:
        architecture: the target.
        others: further targets for which Triton makes the same PTX.
        every: compile for each combination of constants, dtypes and optional arguments. Otherwise
            compile kernels once.
    """

    def __init__(self, architecture: str, others: list[str], index: int, every: bool) -> None:
        self.architecture, self.others = architecture, others
        self.driver = Driver(architecture, index)
        self.every = every
        self.seen: dict[launch.Kernel, set[Any]] = {}
        self.results: list[Compiled] = []

    def __call__(self, kernel: launch.Kernel, grid: Any, *args: Any, **constants: Any) -> None:
        """Compile a kernel for the given arguments."""
        args = tree_map_only(torch.Tensor, launch.raw, args)  # as Kernel passes them to Triton
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
        named = kernel.kernel.__name__, f"{sizes} warps={chosen['num_warps']}"
        self.note(self.architecture, found, found.asm, *named)
        for other in self.others:
            self.note(other, found, assembled(found.asm["ptx"], other, chosen), *named)

    def note(self, architecture: str, found: Any, asm: Any, kernel: str, sizes: str) -> None:
        """Add what a compiled kernel became for an architecture."""
        if self.driver.amd:
            assembly = asm["amdgcn"]
            names = ("vgpr_count", "private_segment_fixed_size")
            usage = [int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1]) for name in names]  # type: ignore[index]
        else:
            assembly = asm["ptx"]
            registers, stack, local = used(asm["cubin"])
            usage = [registers, stack + local]
        labels = architecture, kernel, sizes, found.metadata.num_warps
        self.results.append(Compiled(*labels, assembly, found.metadata.shared, *usage))


def assembled(ptx: str, architecture: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run Triton's last stage for another architecture than that of the PTX."""
    backend = make_backend(GPUTarget("cuda", int(architecture), 32))
    stages: dict[str, Any] = {}
    backend.add_stages(stages, backend.parse_options(options), Language.TRITON)
    ptx = re.sub(r"\.target sm_\d+", f".target sm_{architecture}", ptx)
    return {"ptx": ptx, "cubin": stages["cubin"](ptx, {})}


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
                name = "inductor's cast" if casts else "inductor's scale"
                compiler.note(compiler.architecture, found, found.asm, name, str(sizes))


def compile_operators(compiler: Compiler, operator: str | None) -> None:
    """Compile the kernels that an operator launches, or all operators."""
    driver.set_active(compiler.driver)
    launch.float8_constants.cache_clear()
    with (
        patch.object(launch.Kernel, "__call__", lambda *args, **rest: compiler(*args, **rest)),
        patch.object(launch, "_IS_AMD", compiler.driver.amd),
        patch.object(device, "_nvidia_capability", compiler.driver.capability),
    ):
        # (The kernels are the same for any odd number of rows.)
        for name, (op, args, kwargs) in operator_calls(95, 4096).items():
            is_chosen = operator in (None, op.__name__)
            if is_chosen and "float16" not in name.replace("bfloat16", ""):
                op.implementations["cuda"](*args, **kwargs)


def compiled(argument: str, index: int) -> list[Compiled]:
    """Compile for the architectures of an argument."""
    first, *others = argument.split(",")
    compiler = Compiler(first, others, index, every=not first.startswith("gfx"))
    compile_operators(compiler, os.environ.get("KERNEL"))
    if not index and "KERNEL" not in os.environ:
        compile_inductors(compiler)
    if others:
        # A kernel of which nothing is shared must be the same.
        whole = Compiler(others[-1], [], -1, every=False)
        compile_operators(whole, os.environ.get("KERNEL", "cast_blocks"))
        assembly = {each.assembly for each in compiler.results}
        assert all(each.assembly in assembly for each in whole.results), "other PTX"
    return compiler.results


if __name__ == "__main__":
    gc.freeze()  # torch's objects, which collections would visit for a tenth of the time
    found = [each for index, name in enumerate(sys.argv[1:]) for each in compiled(name, index)]
    print(json.dumps([asdict(each) for each in found]))
