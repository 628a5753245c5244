"""Count the kernels that a GPU would launch, and the bytes that it would move, without a GPU.

    PYTHONPATH=.:tests/support python -m fake_cuda.tables

Tensors are fake, on a fake CUDA device (tests/support/fake_cuda). Eager code runs on them as on a
GPU, and Inductor generates the same code. Kernels are counted, and the bytes that they read and
write: for forward and backward of one linear layer, compared with nn.Linear and torchao; of a layer
of experts; of two blocks of Llama 8B under FSDP2 over 8 ranks; and for the update of the scales of
all 224 weights of Llama 8B after an optimizer step.

GPU times are roofline estimates: the time of these FLOPs and bytes at assumed rates
(`Rates`), but at least a minimum per kernel. The CPU time to dispatch a
layer's step is measured, on tensors without memory.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

from fake_cuda.blocks import count_blocks, count_update
from fake_cuda.counter import Counts, Kernel
from fake_cuda.dispatch import Dispatched, seconds_to_dispatch
from fake_cuda.experts import ExpertsShape, count_experts
from fake_cuda.layer import LayerShape, count_compiled_layer, count_layer
from fake_cuda.process import FakeCudaProcess
from fp8_dist.moe.config import ExpertsRecipe
from scripts.bench.linear import shape_type
from scripts.common.candidates import TORCHAO
from scripts.common.markdown import table
from scripts.common.options import positive
from scripts.common.recipes import BF16, OURS
from scripts.common.report import finish, make_parser, parse

BLOCKS, SEQUENCE, ALL_BLOCKS = 2, 8192, 32
LAYERS_OF_GRAPH = 8
KINDS = ("gemm", "elementwise", "reduction", "transposing copy", "tiny")


@dataclasses.dataclass(frozen=True)
class Rates:
    """Assumed rates of a GPU; the defaults are for an H200."""

    bf16: float = 790.0  # TFLOP/s of GEMMs
    float8: float = 1200.0
    float8_fast: float = 1400.0  # with fast accumulation
    elementwise: float = 4.0  # TB/s of kernels
    reduction: float = 3.5
    transpose: float = 0.27  # of torch's copies that transpose 1-byte elements
    launch: float = 2.5  # microseconds: the least time of a kernel


@dataclasses.dataclass
class Row:
    """The counts of a candidate's layer."""

    name: str
    eager: Counts
    compiled: Counts


def count(process: FakeCudaProcess, shape: LayerShape) -> list[Row]:
    """Count all candidates for one shape."""
    rows = []
    for name in (BF16, *OURS, *TORCHAO):
        each = (process.run(count, name, shape) for count in (count_layer, count_compiled_layer))
        rows.append(Row(name, *each))
    return rows


def counts_table(rows: Sequence[Row]) -> str:
    """A table of the kernels and bytes of layers."""
    header = ["layer", "kernels", "compiled", "GB besides GEMMs", "compiled"]
    header += ["transposing copies", "compiled"]
    lines = []
    for row in rows:
        each = (row.eager, row.compiled)
        lines.append(
            [
                row.name,
                *(str(counts.launches) for counts in each),
                *(_gigabytes(counts) for counts in each),
                *(str(len(counts.by_kind("transposing copy"))) for counts in each),
            ]
        )
    return table(header, lines, "lr")


def roofline_table(rows: Sequence[Row], rates: Rates) -> str:
    """A table of milliseconds: by kind of kernel in eager code; in total, eager and compiled."""
    header = ["layer, ms", "GEMMs", "elementwise", "reductions", "transposing copies", "tiny"]
    header += ["eager", "x bf16's speed", "compiled", "x bf16's speed"]
    bf16 = next(milliseconds(row.eager, rates).total() for row in rows if row.name == BF16)
    lines = []
    for row in rows:
        eager, compiled = milliseconds(row.eager, rates), milliseconds(row.compiled, rates)
        lines.append([row.name, *(f"{eager[kind]:.2f}" for kind in KINDS)])
        for times in (eager, compiled):
            lines[-1] += [f"{times.total():.2f}", f"{bf16 / times.total():.2f}"]
    return table(header, lines, "lr")


def blocks_table(counted: Mapping[str, tuple[Counts, Counts]]) -> str:
    """A table of the kernels and bytes of blocks, and of the update of scales."""
    header = ["blocks", "kernels", "x bf16", "GB besides GEMMs", "collectives"]
    header += ["update: kernels", "GB", "collectives"]
    bf16 = counted[BF16][0].launches
    lines = []
    for name, (step, update) in counted.items():
        line = [name, str(step.launches), f"{step.launches / bf16:.2f}", *_others(step)]
        lines.append([*line, str(update.launches), *_others(update)])
    return table(header, lines, "lr")


def _others(counts: Counts) -> tuple[str, str]:
    return _gigabytes(counts), str(counts.collectives.total())


def _gigabytes(counts: Counts) -> str:
    return f"{counts.bytes_besides_gemms / 1e9:.2f}"


def milliseconds(counts: Counts, rates: Rates) -> Counter[str]:
    """Milliseconds by kind of kernel, from FLOPs or bytes, if kernels run one after the other."""
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


def experts_table(counted: Mapping[str, Counts], rates: Rates) -> str:
    """A table of the kernels and bytes of experts, and of their times relative to bf16."""
    bf16 = milliseconds(counted[BF16], rates).total()
    lines = []
    for name, counts in counted.items():
        times = milliseconds(counts, rates)
        cells = [str(counts.launches), str(len(counts.by_kind("tiny"))), _gigabytes(counts)]
        cells += [f"{times['gemm']:.2f}", f"{times.total():.2f}", f"{bf16 / times.total():.2f}"]
        lines.append([name, *cells])
    header = ["experts", "kernels", "tiny ones", "GB besides GEMMs", "GEMMs, ms", "all, ms"]
    return table([*header, "x bf16's speed"], lines, "lr")


def dispatch_table(seconds: Mapping[str, Dispatched]) -> str:
    """A table of the CPU time of each layer's step, also relative to bf16 in eager code."""
    bf16 = seconds[BF16].eager
    lines = []
    for name, found in seconds.items():
        lines.append([name])
        for each in found:
            lines[-1] += ["", ""] if each is None else [f"{1e6 * each:.0f}", f"{each / bf16:.1f}"]
    header = ["layer, us of CPU time", "eager", "x bf16", "compiled alone", "x eager bf16"]
    header += [f"in a graph of {LAYERS_OF_GRAPH}", "x eager bf16"]
    return table(header, lines, "lr")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status."""
    parser = make_parser("fake_cuda.tables", __doc__)
    default = LayerShape()
    shape = "rows x in_features x out_features of the layer; default: 8192x4096x14336"
    parser.add_argument(
        "--shape", type=shape_type, metavar="MxKxN", default=tuple(default), help=shape
    )
    turns = "turns of each layer whose CPU time is taken; %(default)s"
    parser.add_argument("--turns", type=positive, default=40, help=turns)
    args = parse(parser, argv)
    rates = Rates()
    with FakeCudaProcess() as process:
        rows = count(process, LayerShape(*args.shape))
        names = (BF16, *OURS, "mxfp8+mxfp4", *TORCHAO[:1])
        counted = {
            name: (
                process.run(count_blocks, name, BLOCKS, SEQUENCE),
                process.run(count_update, name, ALL_BLOCKS),
            )
            for name in names
        }
        shape_of_experts = ExpertsShape()
        experts = {
            name: process.run(count_experts, name, shape_of_experts)
            for name in (BF16, *get_args(ExpertsRecipe))
        }
    with FakeCudaProcess() as process:
        layers = (BF16, *OURS, *TORCHAO)
        settings = LayerShape(*args.shape), args.turns, LAYERS_OF_GRAPH
        seconds = process.run(seconds_to_dispatch, layers, *settings, timeout=1800.0)
    tables = {
        "gpu layer": counts_table(rows),
        f"gpu roofline, {rates}": roofline_table(rows, rates),
        f"gpu experts, {shape_of_experts}": experts_table(experts, rates),
        "gpu blocks": blocks_table(counted),
        "gpu dispatch": dispatch_table(seconds),
    }
    return finish(args, tables)


if __name__ == "__main__":
    sys.exit(main())
