"""Compiles Triton kernels for a Hopper where there is none, for a day on a borrowed GPU.

    python -m scripts.bench.gpu_ahead           compiles what `gpu_smoke` and layers launch
    python -m scripts.bench.gpu_ahead --look    on the GPU: are they found there?

The kernels go to Triton's cache (TRITON_CACHE_DIR). What one release of Triton has compiled,
another one does not find, nor does the same release for another Python or in a folder of another
name. With Triton 3.6, each kernel also has a launcher in C, which is compiled for this Python.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from fp8_dist.kernels.cuda.triton import launch
from scripts.bench.gpu_operators import Call, operator_calls
from scripts.bench.gpu_results import Result, add_options, run
from scripts.common.options import command_parser

# Rows are tens, since kernels are compiled alike for any number with the same divisors. Columns are
# those of Llama 8B and of experts, since rows of a length are held in registers.
SHAPES = (None, *product((80, 95), (1536, 2048, 4096, 14336)))
LOOKS = 12  # calls of operators


class HopperDriver:
    """Answers what compilers ask of the driver of a Hopper that is not here."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(found: list[Any]) -> Iterator[None]:
    """In here kernels are compiled for each choice of block sizes, and not launched."""

    def compiled(tuned: launch.Tuned, grid: Any, *args: Any, **constants: Any) -> None:
        for config in tuned.configs:
            options = config.all_kwargs() | {"enable_fp_fusion": False}
            found.append(tuned.kernel.run(*args, grid=(1,), warmup=True, **constants, **options))

    launch.float8_constants.cache_clear()
    with (
        patch.object(launch.Tuned, "__call__", compiled),
        patch.object(launch, "rounds_to", lambda dtype, device: True),
    ):
        yield
    launch.float8_constants.cache_clear()


def calls() -> Iterator[tuple[str, Call]]:
    """Yield the calls of operators, on tensors on the CPU."""
    for shape in SHAPES:
        for odd in (False, True) if shape is None else (shape[0] % 16 != 0,):
            yield from operator_calls("cpu", odd, shape).items()


def entries() -> int:
    """Return how many folders Triton's cache has, one for each kernel and launcher."""
    folder = Path(triton.knobs.cache.dir)
    return sum(each.is_dir() for each in folder.iterdir()) if folder.exists() else 0


def compile_calls(chosen: Iterator[tuple[str, Call]]) -> list[Any]:
    """Compile what the calls launch; return the kernels."""
    found: list[Any] = []
    with compiling(found):
        for _, (op, args, kwargs) in chosen:
            op.implementations["cuda"](*args, **kwargs)
    return found


def look() -> Result:
    """Compile some kernels, and say how many were compiled already."""
    before = entries()
    found = compile_calls(islice(calls(), LOOKS))
    new, version = entries() - before, f"Triton {triton.__version__}"
    text = f"{before} entries; of {len(found)} kernels {new} were not found ({version})"
    return Result(note=text)


def build_launchers(kernels: Sequence[Any]) -> None:
    """Build what Triton launches kernels with, against a library without any function."""
    if not hasattr(nvidia, "make_launcher"):  # since Triton 3.7 one serves all kernels
        return
    with tempfile.TemporaryDirectory() as folder:
        stub = f"{folder}/libcuda.so.1"
        command = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", stub, "-x", "c", "/dev/null"]
        subprocess.run(command, check=True)
        ctypes.CDLL(stub)  # what is built asks for this name when it is loaded
        sys.setdlopenflags(os.RTLD_LAZY)  # and for its functions when it calls them
        with patch.object(nvidia, "libcuda_dirs", lambda: [folder]):
            nvidia.library_dirs.cache_clear()
            nvidia.CudaUtils()
            for kernel in kernels:
                nvidia.CudaLauncher(kernel.src, kernel.metadata)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = command_parser("scripts.bench.gpu_ahead", __doc__)
    parser.add_argument("--look", action="store_true", help="compile a few, on the GPU itself")
    add_options(parser, "cache")
    args = parser.parse_args(argv)
    if args.look:
        return run(args, [("look", look)])
    driver.set_active(HopperDriver())
    before = entries()
    chosen = (each for each in calls() if any(text in each[0] for text in args.only))
    kernels = compile_calls(chosen)
    build_launchers(kernels)
    print(f"{len(kernels)} kernels; {entries() - before} new entries of {entries()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
