"""Compile Triton kernels for an architecture, as they would be launched, and print the results.

    python tests/support/compile_kernels.py 90 [first] [FILE]

JSON, one object for each kernel and choice of block sizes (``first``: for the first choice alone),
with the keys of :class:`Compiled`. ``former``: the kernels of ``former_kernels.py`` instead of the
library's; ``inductor``: those of Inductor that cast to both layouts, and compute a scale. It needs
no GPU.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from fake_cuda.process import FakeCudaProcess
from former_kernels import call_former
from inductor_kernels import code_of_product, loaded, sources
from ptx import Instance, Traffic
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fp8_dist import kernels
from fp8_dist.kernels import CustomOp, cuda, encoding, gemm
from fp8_dist.kernels.cuda.triton import launch
from fp8_dist.kernels.folding import fold_gradient

assert cuda.HAS_TRITON

M, K = 8192, 4096
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass
class Compiled:
    """A kernel for one choice of block sizes.

    Attributes:
        case: the operator that launches it, with its place among the launches of all operators.
        kernel: its name.
        choice: the block sizes.
        warps: of an instance.
        assembly: PTX, or AMD's assembly.
        shared: bytes of shared memory of an instance.
        registers: of a thread.
        spilled: bytes of a thread's memory for registers that do not fit.
        instructions: that each warp issues (NVIDIA).
        traffic: what an instance moves (NVIDIA).
    """

    case: str
    kernel: str
    choice: str
    warps: int
    assembly: str
    shared: int
    registers: int
    spilled: int
    instructions: int = 0
    traffic: Traffic | None = None


class Driver:
    """What compilers ask the driver of a GPU that is not here."""

    def __init__(self, architecture: str) -> None:
        self.amd = architecture.startswith("gfx")
        number = architecture if self.amd else int(architecture)
        self.target = GPUTarget(*(("hip", number, 64) if self.amd else ("cuda", number, 32)))

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Compiles what would be launched."""

    def __init__(self, amd: bool, only_first: bool) -> None:
        self.amd = amd
        self.only_first = only_first
        self.case = ""
        self.results: list[Compiled] = []

    def __call__(self, tuned: launch.Tuned, args: Any, constants: dict[str, Any]) -> None:
        """Compile a kernel for these arguments, for each choice of block sizes."""
        for config in tuned.configs[: 1 if self.only_first else None]:
            chosen = config.all_kwargs() | {"enable_fp_fusion": False}
            found = tuned.kernel.run(*args, grid=(1,), warmup=True, **constants, **chosen)
            sizes = " ".join(f"{name}={size}" for name, size in config.kwargs.items())
            labels = self.case, tuned.kernel.__name__, f"{sizes} warps={config.num_warps}"
            make = self._of_amd if self.amd else self._of_nvidia
            self.results.append(make(labels, config.num_warps, found, args))

    @staticmethod
    def _of_amd(labels: Any, warps: int, found: Any, args: Any) -> Compiled:
        assembly = found.asm["amdgcn"]
        names = ("vgpr_count", "private_segment_fixed_size")
        counts = [int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1]) for name in names]  # type: ignore[index]
        return Compiled(*labels, warps, assembly, found.metadata.shared, *counts)

    @staticmethod
    def _of_nvidia(labels: Any, warps: int, found: Any, args: Any) -> Compiled:
        ptx = found.asm["ptx"]
        sass = disassembled(ptx)
        usage = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", sass)
        registers, stack, local = map(int, usage.groups())  # type: ignore[union-attr]
        integers = [a for a in args if isinstance(a, torch.Tensor) and a.dtype is torch.int64]
        tables = {a.data_ptr(): a.numpy().ravel() for a in integers}
        traffic = Instance(ptx, parameters_of(args), tables).run()
        return Compiled(
            *(*labels, warps, ptx, found.metadata.shared, registers, stack + local),
            *(issued(sass, traffic.rounds), traffic),
        )


def disassembled(ptx: str) -> str:
    """Return the machine code of a kernel, whose loops are not unrolled, and its resources."""
    (target,) = re.findall(r"^\.target (\w+)", ptx, re.M)
    assembler = "ptxas-blackwell" if target.startswith("sm_10") else "ptxas"
    rolled = re.sub(r"^(\$L__BB\w+:)", r'\1\n.pragma "nounroll";', ptx, flags=re.M)
    with tempfile.TemporaryDirectory() as folder:
        code = f"{folder}/code.cubin"
        options = [f"--gpu-name={target}", "--fmad=false", "-o", code, "-"]
        subprocess.run([_TOOLS / assembler, *options], input=rolled, text=True, check=True)
        show = [_TOOLS / "cuobjdump", "-sass", "-res-usage", code]
        return subprocess.run(show, capture_output=True, text=True, check=True).stdout


def parameters_of(args: Any) -> list[int]:
    """Return the entry's parameters: addresses of tensors, all apart, and integers."""
    found: list[int] = []
    for arg in args:
        if isinstance(arg, tuple):
            found += parameters_of(arg)
        elif isinstance(arg, torch.Tensor):
            found.append(arg.data_ptr())
        elif arg is not None and arg != 1:  # what is 1 is compiled in
            found.append(arg)
    return found


def issued(sass: str, rounds: list[int]) -> int:
    """Return how many instructions a warp issues, with so many rounds of each loop."""
    text = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;", sass)
    places = {int(place, 16): n for n, (place, _) in enumerate(text)}
    # Then come slow paths of divisions, those of shuffles in divergent warps, and the last branch,
    # to itself.
    targets = [(n, each, places[int(to, 16)]) for n, each, to in _branches(text)]
    ends = [to for n, each, to in targets if each.startswith("CALL") or to == n]
    ends += [n for n, (_, each) in enumerate(text) if each.startswith("WARPSYNC.COLLECTIVE")]
    text = text[: min(ends)]
    loops = dict(sorted((to, n) for n, _, to in targets if to < n < len(text)))
    assert len(loops) == len(rounds), "the assembler changed the loops"
    times = [1] * len(text)
    for (first, last), count in zip(loops.items(), rounds, strict=True):
        times[first : last + 1] = [count] * (last + 1 - first)  # inner loops come after outer ones
    return sum(n for n, (_, each) in zip(times, text, strict=True) if each != "NOP")


def _branches(text: list[tuple[str, str]]) -> list[tuple[int, str, str]]:
    """Return the index, the instruction and the target of each branch and call."""
    found = [(n, each, re.search(r"0x(\w+)$", each)) for n, (_, each) in enumerate(text)]
    return [(n, each, to[1]) for n, each, to in found if to and re.search("BRA|CALL", each)]


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
    run(gemm.dequantize_blocks, data, numbers, (1, 128, 0, 0), torch.bfloat16)
    run(gemm.gemm_scales, numbers, numbers, 4)
    run(gemm.tiled_exponents, numbers, numbers, 1)
    codes, each = run(encoding.encode_float8, x, 1)
    run(encoding.encode_float8, x, -1)
    codes, each = codes.view(2, -1, K), each.view(2, -1, K // 128)
    half = M // 2
    run(encoding.sum_of_rows, codes, each, x[:half], 1)
    run(encoding.sum_of_rows, x.view(2, -1, K), None, x[:half].float(), 1)
    run(kernels.transposed_copy, data)
    product = torch.empty(half, K)
    run(gemm.scale_product, product, rows[:half], columns)
    run(gemm.scale_product, product, one, columns)
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


def compile_inductors(results: list[Compiled]) -> None:
    """Compile the kernels that cast a product, for block sizes among which Inductor chooses."""
    e4m3, bf16 = torch.float8_e4m3fn, torch.bfloat16
    with FakeCudaProcess() as process:
        code = process.run(code_of_product, (M, K), bf16, e4m3)
    a, b = (torch.empty(M, K, dtype=bf16) for _ in range(2))
    copies = torch.empty(K, M, dtype=e4m3), torch.empty(M, K, dtype=e4m3)
    one, scale = torch.zeros(()), torch.zeros(())
    tiles = ((32, 32, 4), (64, 64, 8), (16, 256, 8), (256, 16, 8))
    with tempfile.TemporaryDirectory() as folder:
        for name, source in sources(code).items():
            kernel = loaded(Path(folder), name, source)
            casts = "YBLOCK" in kernel.arg_names
            args = (a, b, one, *copies, M, K) if casts else (one, scale, 1)
            for y, x, warps in tiles if casts else ((1, 1, 1),):
                sizes = {"YBLOCK": y, "XBLOCK": x} if casts else {"XBLOCK": x}
                found = kernel.run(*args, grid=(1,), warmup=True, num_warps=warps, **sizes)
                labels = "cast" if casts else "scale", name, f"{sizes} warps={warps}"
                results.append(Compiler._of_nvidia(labels, warps, found, args))


def main(architecture: str, *words: str) -> None:
    target = Driver(architecture)
    driver.set_active(target)
    compiler = Compiler(target.amd, "first" in words)
    launch.Tuned.__call__ = lambda tuned, grid, key, device, *args, **constants: compiler(  # type: ignore[method-assign]
        tuned, args, constants
    )
    launch.rounds_to = lambda dtype, device: not target.amd
    counts: dict[str, int] = {}

    def run(op: CustomOp[..., Any], *args: Any) -> Any:
        """What is registered for GPUs, on tensors on the CPU."""
        name = op.portable.__name__
        counts[name] = counts.get(name, 0) + 1
        compiler.case = f"{name} {counts[name]}"
        return op.implementations["cuda"](*args)

    if "inductor" in words:
        compile_inductors(compiler.results)
    else:
        (call_former if "former" in words else call_all)(run)
    print(json.dumps([asdict(each) for each in compiler.results]))


if __name__ == "__main__":
    main(*sys.argv[1:])
