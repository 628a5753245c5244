"""Rates of this machine's GPU: copies, and GEMMs of each kind. They calibrate docs/gpu.md.

    python -m scripts.bench.gpu_probe

A stage of a day (see gpu_results). Where torch refuses a GEMM, the line has its error.
"""

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from fp8_dist.kernels.cuda import HAS_TRITON
from fp8_dist.kernels.cuda.gemm import block_mm
from scripts.bench.gpu import FFN, ROWS, WARM_UP, Case, D, make_parser, readings, run_stage
from scripts.bench.gpu_results import Result
from scripts.bench.layers import Shape, shape_text

SHAPES: tuple[Shape, ...] = ((ROWS, D, FFN), (ROWS, FFN, D), (2048, D, FFN))
COPIED = 2**30  # bytes, more than a cache holds
COPIES = ("copy", "amax", "elementwise", "transposing copy of bytes")
GEMMS = (
    "bf16",
    "float8, fast accumulation",
    "float8",
    "float8 by rows, fast accumulation",
    "float8 by rows",
    "float8 in blocks of 128",
)
E4M3 = torch.float8_e4m3fn


def versions() -> Result:
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
    return Result(note=", ".join(found) + ("" if HAS_TRITON else " (casts by torch's operators)"))


def copies() -> dict[str, tuple[Callable[[], object], int]]:
    """Functions that move bytes, and how many: read and written."""
    source = torch.empty(COPIED // 2, dtype=torch.bfloat16, device="cuda").fill_(1)
    target, rows = torch.empty_like(source), COPIED // 2 // D
    matrix = source.view(torch.uint8)[: rows * D].view(rows, D)
    moved = (
        (lambda: target.copy_(source), 2 * COPIED),
        (lambda: source.view(-1, D).abs().amax(), COPIED),
        (lambda: torch.mul(source, 2, out=target), 2 * COPIED),
        (lambda: matrix.t().contiguous(), 2 * matrix.numel()),
    )
    return dict(zip(COPIES, moved, strict=True))


def copy_rate(name: str, repeat: int) -> Result:
    """The rate of one of the copies."""
    run, moved = copies()[name]
    readings(run, WARM_UP)
    return Result(readings=readings(run, repeat), bytes=moved)


@lru_cache(maxsize=1)  # operands of a shape go when the next one comes
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
    found = (
        lambda: a @ b,
        scaled(one, one, True),
        scaled(one, one, False),
        scaled(rows, columns, True),
        scaled(rows, columns, False),
        in_blocks,
    )
    return dict(zip(GEMMS, found, strict=True))


def gemm_rate(name: str, shape: Shape, repeat: int) -> Result:
    """The rate of one of the GEMMs."""
    run, (m, k, n) = gemms(shape)[name], shape
    readings(run, WARM_UP)
    about = {"shape": shape_text(shape), "flops": 2.0 * m * k * n}
    return Result(readings=readings(run, repeat), **about)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """What is here, and its rates."""
    yield "versions", versions
    for name in COPIES:
        yield name, partial(copy_rate, name, args.repeat)
    for shape in SHAPES:
        for name in GEMMS:
            yield f"{shape_text(shape)}, {name}", partial(gemm_rate, name, shape, args.repeat)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = make_parser("scripts.bench.gpu_probe", __doc__, "rates", repeat=10)
    return run_stage(parser, argv, cases)


if __name__ == "__main__":
    sys.exit(main())
