"""Rates of this machine's GPU: copies, and GEMMs of each kind. They calibrate docs/gpu.md.

    python -m scripts.bench.gpu_probe

Needs torch alone. A line is printed when it is measured. Where torch refuses a GEMM, the line has
the first words of its error.
"""

import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8_dist.kernels.cuda import HAS_TRITON
from fp8_dist.kernels.cuda.gemm import block_mm
from scripts.bench.gpu import FEW, TOKENS, Work, event_seconds, measure
from scripts.bench.layers import Shape, shape_text
from scripts.common.llama import MODELS
from scripts.common.report import make_parser, start

D, FFN = MODELS["8b"].dim, MODELS["8b"].ffn_dim
SHAPES: tuple[Shape, ...] = ((TOKENS, D, FFN), (TOKENS, FFN, D), (FEW, D, FFN))
COPIED = 2**30  # bytes, more than a cache holds
E4M3 = torch.float8_e4m3fn


def versions() -> str:
    """The GPU, its driver's view of it, and the releases of what is installed."""
    gpu = torch.cuda.get_device_properties(0)
    found = [f"{gpu.name}, {gpu.multi_processor_count} multiprocessors"]
    found += [f"{gpu.total_memory / 1e9:.0f} GB, capability {gpu.major}.{gpu.minor}"]
    found += [f"{os.cpu_count()} cores, Python {sys.version.split()[0]}"]
    found += [f"torch {torch.__version__}, CUDA {torch.version.cuda}"]
    for name in ("triton", "torchao"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found) + ("" if HAS_TRITON else " (casts by torch's operators)")


def copies() -> dict[str, tuple[Callable[[], object], int]]:
    """Functions that move bytes, and how many: read and written."""
    source = torch.empty(COPIED // 2, dtype=torch.bfloat16, device="cuda").fill_(1)
    target, rows = torch.empty_like(source), COPIED // 2 // D
    matrix = source.view(torch.uint8)[: rows * D].view(rows, D)
    return {
        "copy": (lambda: target.copy_(source), 2 * COPIED),
        "amax": (lambda: source.view(-1, D).abs().amax(), COPIED),
        "elementwise": (lambda: torch.mul(source, 2, out=target), 2 * COPIED),
        "transposing copy of bytes": (lambda: matrix.t().contiguous(), 2 * matrix.numel()),
    }


def gemms(shape: Shape) -> dict[str, Callable[[], object]]:
    """Products of ``[M, K]`` and ``[K, N]``, on random data."""
    m, k, n = shape
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = torch.randn(n, k, device="cuda").bfloat16().t()
    a8, b8 = a.to(E4M3), b.t().to(E4M3).t()
    one, rows, columns = (torch.ones(size, device="cuda") for size in ((), (m, 1), (1, n)))

    def scaled(scale_a: torch.Tensor, scale_b: torch.Tensor, fast: bool) -> Callable[[], object]:
        options: Any = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
        return lambda: torch._scaled_mm(a8, b8, scale_a, scale_b, **options)

    def in_blocks() -> object:
        product = block_mm(a8, b8, *exponents, (1, 128, 0, 0), (128, 128, 0, 0), torch.bfloat16)
        if product is None:
            raise RuntimeError("the device has no GEMM for blocks of 128")
        return product

    sizes = (m, k // 128), (k // 128, n // 128)
    exponents = [torch.full(size, 127, dtype=torch.uint8, device="cuda") for size in sizes]
    return {
        "bf16": lambda: a @ b,
        "float8, fast accumulation": scaled(one, one, True),
        "float8": scaled(one, one, False),
        "float8 by rows, fast accumulation": scaled(rows, columns, True),
        "float8 by rows": scaled(rows, columns, False),
        "float8 in blocks of 128": in_blocks,
    }


def seconds(run: Callable[[], object], repeat: int) -> float:
    """The median time of a run on the device."""
    return measure(Work(run, 0.0, 0), repeat, event_seconds)[0]


def rate(name: str, run: Callable[[], object], amount: float, unit: str, repeat: int) -> None:
    """Print a rate in 10^12 per second, or why there is none."""
    try:
        shown = f"{amount / seconds(run, repeat) / 1e12:,.2f} {unit}"
    except RuntimeError as error:
        shown = f"refused: {str(error).splitlines()[0][:80]}"
    print(f"{name}: {shown}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = start(make_parser("scripts.bench.gpu_probe", __doc__, repeat=10), argv)
    print(versions(), flush=True)
    for name, (run, moved) in copies().items():
        rate(name, run, moved, "TB/s", args.repeat)
    torch.cuda.empty_cache()
    for shape in SHAPES:
        m, k, n = shape
        for name, run in gemms(shape).items():
            rate(f"{shape_text(shape)}, {name}", run, 2 * m * k * n, "TFLOP/s", args.repeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
