"""Times of counted kernels on a GPU of which only a few rates are known."""

from collections import Counter
from dataclasses import dataclass

from scripts.common.fake_cuda.counter import Counts, Kernel


@dataclass(frozen=True)
class Rates:
    """Assumed rates of a GPU; the defaults are for an H200.

    Attributes:
        bf16, float8, float8_fast: TFLOP/s of GEMMs (fast: with fast accumulation).
        elementwise, reduction, transpose: TB/s of kernels; transpose: of torch's copies that change
            the order of 1-byte elements.
        launch: microseconds that a kernel takes at least.
    """

    bf16: float = 790.0
    float8: float = 1200.0
    float8_fast: float = 1400.0
    elementwise: float = 4.0
    reduction: float = 3.5
    transpose: float = 0.27
    launch: float = 2.5


def milliseconds(counts: Counts, rates: Rates) -> Counter[str]:
    """Time by kind of kernel: each takes what its flops or bytes take, one after the other."""
    times: Counter[str] = Counter()
    for kernel in counts.kernels:
        at_least = kernel.launches * rates.launch * 1e-3
        times[kernel.kind] += max(_milliseconds(kernel, rates), at_least)
    return times


def _milliseconds(kernel: Kernel, rates: Rates) -> float:
    if kernel.kind == "gemm":
        tflops = {"bf16": rates.bf16, "float8": rates.float8, "float8 fast": rates.float8_fast}
        return kernel.flops / tflops[kernel.precision] * 1e-9
    bandwidths = {"reduction": rates.reduction, "transposing copy": rates.transpose}
    return kernel.bytes / bandwidths.get(kernel.kind, rates.elementwise) * 1e-9
