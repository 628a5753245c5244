"""Times forward and backward of one linear layer beside nn.Linear and torchao, in one run.

    python scripts/bench_linear.py --assert --write

A *step* is forward and backward with a weight that has just changed: every operand is cast, once
or as often as the library does. (What is known of our weight is dropped before each step, outside
the clock; torchao casts its weight in every forward and backward.) A *micro-batch* finds the weight
as the step before left it. `--assert` is about the recipe tensorwise on a CPU, one thread:

* at 512 x 1024 x 1024 a step takes at most 2.0x of bf16 and a third of torchao's, multiplies the
  same float8 bytes with the same scales, and its results are as close to the exact products;
* at 16 x 16 x 16, where all is overhead, a step takes at most a third of torchao's, has at most 35
  operators under a dispatch mode, and at most a third of torchao's with nested ones. (35 of these
  can't be had: nn.Linear alone has 29.)
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from bench_layers import Layer, Shape, dispatched_by, layer_of, operators_of
from bench_operands import Recorder, products_of_torchao
from bench_peers import BF16, FP32, OURS, TORCHAO, faster_than_peer, peer_of
from bench_ranks import run_on_ranks
from benchmarks import (
    PAGE,
    TOLERANCE_DB,
    Check,
    Report,
    Timed,
    make_parser,
    markdown,
    medians,
    milliseconds,
    ratio,
    section,
    shape_text,
    shape_type,
    sqnr,
    start,
)
from torch.distributed.device_mesh import init_device_mesh

SPEED, OVERHEAD = (512, 1024, 1024), (16, 16, 16)
MOST_OF_BF16, LEAST_OF_TORCHAO, MOST_DISPATCHED = 2.0, 3.0, 35
GEMMS = ("output", "grad_input", "grad_weight")
TITLE = "A linear layer"
ABOUT = """\
Forward and backward of one layer of in_features x out_features without bias on rows of bf16 (fp32:
of fp32), eager; medians of {repeat} turns. "step": the weight has changed, so that every operand is
cast; "micro-batch": it has not. "dispatched": operators of a step, as a TorchDispatchMode sees
them (our custom ones, as in a graph; what is timed takes shorter ways, of more operators of
torch's); "operators": of what is timed, nested ones included, as torch.profiler counts them. dB:
how close a result is to the fp64 product of the same float8 operands (torchao's; "same operands":
ours multiplies the same bytes and scales)."""
ABOUT_DTENSORS = """\
The same at {shape} on DTensors, as tensor parallelism runs it: weight Shard(0), input replicated,
on a mesh of one rank, where nothing waits for another."""


@dataclasses.dataclass
class Row:
    """What is measured of a candidate at a shape; None: it does not apply.

    Attributes:
        step, micro_batch: seconds.
        dispatched: operators of a step.
        operators: nested ones included.
        decibels: of output, grad_input and grad_weight to the exact products of torchao's operands.
        same_operands: whether these are ours too.
    """

    name: str
    shape: Shape
    step: float
    micro_batch: float | None = None
    dispatched: int | None = None
    operators: int | None = None
    decibels: dict[str, float] | None = None
    same_operands: bool | None = None


def measure(shape: Shape, args: argparse.Namespace) -> list[Row]:
    """All candidates at one shape."""
    names = [FP32, BF16, *OURS, *TORCHAO]
    layers = {name: layer_of(name, shape, args.device) for name in names}
    timed = {name: Timed(layer.run, layer.change_weight) for name, layer in layers.items()}
    cached = {name: layer_of(name, shape, args.device) for name in OURS}
    timed |= {f"{name}, cached": Timed(each.run, each.clear) for name, each in cached.items()}
    calls = max(1, min(50, 10**7 // math.prod(shape)))  # of what takes microseconds
    seconds = medians(timed, args, calls=calls, description=shape_text(shape))
    rows = []
    for name, layer in layers.items():
        layer.change_weight()
        row = Row(name, shape, seconds[name], seconds.get(f"{name}, cached"))
        row.operators = operators_of(layer.run)
        layer.change_weight()
        row.dispatched = dispatched_by(layer.run)
        rows.append(row)
    add_accuracy(rows, layers, shape, args.device)
    return rows


def add_accuracy(
    rows: Iterable[Row], layers: dict[str, Layer], shape: Shape, device: torch.device
) -> None:
    """Fills in how close the results of a recipe that torchao has too are to the exact products."""
    by_name = {row.name: row for row in rows}
    for theirs in TORCHAO:
        products = products_of_torchao(layer_of(theirs, shape, device).run)
        exact = {gemm: p.exact() for gemm, p in zip(GEMMS, products, strict=False)}
        ours = theirs.removeprefix("torchao ")
        for name in (ours, theirs):
            layer, recorder = layers[name], Recorder()
            layer.change_weight()
            with recorder if name == ours else nullcontext():
                output = layer.run()
            found = dict(zip(GEMMS, (output, layer.x.grad, layer.module.weight.grad), strict=True))
            row = by_name[name]
            row.decibels = {gemm: sqnr(exact[gemm], found[gemm]) for gemm in exact}
            if name == ours:
                row.same_operands = recorder.saw(products)


def dtensor_rows(shape: Shape, args: argparse.Namespace) -> list[Row]:
    """nn.Linear, ours and torchao's on DTensors; called on one rank."""
    mesh = init_device_mesh(args.device.type, (1,), mesh_dim_names=("tp",))
    names = [BF16, "tensorwise", "rowwise_folded", *TORCHAO[:1]]
    layers = {name: layer_of(name, shape, args.device, mesh) for name in names}
    timed = {name: Timed(layer.run, layer.change_weight) for name, layer in layers.items()}
    seconds = medians(timed, args, calls=20, description="DTensors")
    rows = []
    for name, layer in layers.items():
        layer.change_weight()
        rows.append(Row(name, shape, seconds[name], operators=operators_of(layer.run)))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown: the candidates at one shape."""
    head = ["layer", "step, ms", "x bf16", "faster than torchao", "micro-batch, ms"]
    head += ["dispatched", "operators"]
    lines = [[*head, *(f"{gemm}, dB" for gemm in GEMMS), "same operands"]]
    steps = {row.name: row.step for row in rows}
    for row in rows:
        faster = faster_than_peer(row.name, steps)
        decibels = row.decibels or {}
        lines.append(
            [
                row.name,
                milliseconds(row.step),
                ratio(row.step, steps.get(BF16)),
                "" if faster is None else f"{faster:.2f}x",
                "" if row.micro_batch is None else milliseconds(row.micro_batch),
                "" if row.dispatched is None else str(row.dispatched),
                "" if row.operators is None else str(row.operators),
                *(f"{decibels[gemm]:.2f}" if gemm in decibels else "" for gemm in GEMMS),
                {None: "", True: "yes", False: "NO"}[row.same_operands],
            ]
        )
    return markdown(lines)


def dtensor_table(rows: Sequence[Row], plain: Sequence[Row]) -> str:
    """Markdown: beside the plain layers, what DTensors add."""
    without = {row.name: row for row in plain}
    lines = [["layer", "plain, ms", "on DTensors, ms", "added, ms", "operators", "on DTensors"]]
    for row in rows:
        base = without[row.name]
        lines.append(
            [
                row.name,
                milliseconds(base.step),
                milliseconds(row.step),
                milliseconds(max(row.step - base.step, 0.0)),
                str(base.operators),
                str(row.operators),
            ]
        )
    return markdown(lines)


def checks(rows: Sequence[Row]) -> list[Check]:
    """What `--assert` asks of rows at the shapes that it names."""
    known = {(row.shape, row.name): row for row in rows}
    found = []
    for shape in (SPEED, OVERHEAD):
        at = shape_text(shape)
        ours, bf16 = known.get((shape, "tensorwise")), known.get((shape, BF16))
        if ours is None or bf16 is None:
            continue
        theirs = known.get((shape, str(peer_of("tensorwise"))))
        if theirs is None:
            found.append(Check(f"{at}: torchao is installed", False))
            continue
        faster = theirs.step / ours.step
        found.append(
            Check(
                f"{at}: {faster:.2f}x faster than torchao, at least {LEAST_OF_TORCHAO}",
                faster >= LEAST_OF_TORCHAO,
            )
        )
        found += _speed_checks(at, ours, theirs, bf16) if shape == SPEED else []
        found += _overhead_checks(at, ours, theirs) if shape == OVERHEAD else []
    return found


def _overhead_checks(at: str, ours: Row, theirs: Row) -> list[Check]:
    assert ours.dispatched is not None
    assert ours.operators is not None
    assert theirs.operators is not None
    return [
        Check(
            f"{at}: {ours.dispatched} operators under a dispatch mode (torchao: "
            f"{theirs.dispatched}), at most {MOST_DISPATCHED}",
            ours.dispatched <= MOST_DISPATCHED,
        ),
        Check(
            f"{at}: {ours.operators} with nested ones, at most a third of torchao's "
            f"{theirs.operators}",
            3 * ours.operators <= theirs.operators,
        ),
    ]


def _speed_checks(at: str, ours: Row, theirs: Row, bf16: Row) -> list[Check]:
    times = ours.step / bf16.step
    found = [
        Check(f"{at}: {times:.2f}x of bf16, at most {MOST_OF_BF16}", times <= MOST_OF_BF16),
        Check(f"{at}: the operands are torchao's, bit for bit", bool(ours.same_operands)),
    ]
    assert ours.decibels is not None
    assert theirs.decibels is not None
    for gemm, ahead in ours.decibels.items():
        found.append(
            Check(
                f"{at}: {gemm} {ahead:.2f} dB from the exact product, torchao's "
                f"{theirs.decibels[gemm]:.2f}",
                ahead >= theirs.decibels[gemm] - TOLERANCE_DB,
            )
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = make_parser(__doc__, repeat=21)
    parser.add_argument(
        "--shapes",
        type=shape_type,
        nargs="+",
        metavar="MxKxN",
        default=[SPEED, OVERHEAD],
        help="rows x in_features x out_features; default: 512x1024x1024 16x16x16",
    )
    parser.add_argument(
        "--assert", dest="asserted", action="store_true", help="fail where a target is missed"
    )
    args = start(parser, argv)
    if args.asserted and not {SPEED, OVERHEAD} <= set(args.shapes):
        parser.error("--assert is about 512x1024x1024 and 16x16x16: --shapes must have both")
    rows = [row for shape in args.shapes for row in measure(shape, args)]
    blocks = [
        f"### {shape_text(shape)}\n\n{table([row for row in rows if row.shape == shape])}"
        for shape in args.shapes
    ]
    smallest = min(args.shapes, key=math.prod)
    on_dtensors = run_on_ranks(1, args, dtensor_rows, smallest, args)
    plain = [row for row in rows if row.shape == smallest]
    blocks.append(
        f"### On DTensors\n\n{ABOUT_DTENSORS.format(shape=shape_text(smallest))}\n\n"
        f"{dtensor_table(on_dtensors, plain)}"
    )
    report = Report(PAGE, {TITLE: section(args, ABOUT.format(repeat=args.repeat), *blocks)})
    report.data = [dataclasses.asdict(row) | {"dtensors": False} for row in rows]
    report.data += [dataclasses.asdict(row) | {"dtensors": True} for row in on_dtensors]
    report.checks = checks(rows)
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(main())
