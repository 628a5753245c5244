"""Times forward and backward of one linear layer beside nn.Linear and torchao, in one run.

    python -m scripts.bench.linear --assert

A *step* is forward and backward with a weight that has just changed: every operand is cast, once
or as often as the library does. (What is known of our weight is dropped before each step, outside
the clock; torchao casts its weight in every forward and backward.) A *micro-batch* finds the weight
as the step before left it. `--assert` is about the recipe tensorwise on a CPU, one thread:

* at 512 x 1024 x 1024 a step takes at most 2.0x of bf16 and a third of torchao's, multiplies the
  same float8 bytes with the same scales, and its results are as close to the exact products. (On
  CPUs with AMX, which run bf16 GEMMs and torchao's float8 GEMMs in tiles, casts are more of a step:
  2.5x of bf16, and 1 / 2.5 of torchao's.)
* at 16 x 16 x 16, where all is overhead, a step takes at most half of torchao's, has at most 35
  operators under a dispatch mode, and at most half of torchao's with nested ones. (How many torchao
  has depends on the CPU: 285 and 387 were seen.)
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import init_device_mesh

from scripts.bench import timing
from scripts.bench.layers import Layer, Shape, dispatched_by, layer_of, operators_of
from scripts.common.candidates import BF16, FP32, OURS, TORCHAO, peer_of
from scripts.common.gemms import GEMMS, float8_gemms
from scripts.common.markdown import table
from scripts.common.metrics import sqnr
from scripts.common.ranks import run_on_ranks
from scripts.common.report import Check, finish, make_parser, start

SPEED, OVERHEAD = (512, 1024, 1024), (16, 16, 16)
HAS_AMX = torch.cpu._is_amx_tile_supported()
MOST_OF_BF16, MOST_DISPATCHED = 2.5 if HAS_AMX else 2.0, 35
LEAST_OF_TORCHAO = {SPEED: 2.5 if HAS_AMX else 3.0, OVERHEAD: 2.0}


@dataclasses.dataclass
class Row:
    """What is measured of a candidate at a shape; None: it does not apply."""

    name: str
    shape: Shape
    step: float  # seconds
    micro_batch: float | None = None  # seconds
    dispatched: int = 0  # operators of a step under a dispatch mode
    operators: int = 0  # of a step, nested ones included
    # Of each GEMM's result, to the exact product of torchao's operands; whether these are ours too.
    decibels: dict[str, float] = dataclasses.field(default_factory=dict)
    same_operands: bool | None = None


def measure(shape: Shape, args: argparse.Namespace) -> list[Row]:
    """All candidates at one shape."""
    names = [FP32, BF16, *OURS, *TORCHAO]
    layers = {name: layer_of(name, shape, args.device) for name in names}
    timed = {name: timing.Timed(layer.run, layer.change_weight) for name, layer in layers.items()}
    cached = {name: layer_of(name, shape, args.device) for name in OURS}
    timed |= {
        f"{name}, cached": timing.Timed(each.run, each.clear) for name, each in cached.items()
    }
    calls = max(1, min(50, 10**7 // math.prod(shape)))  # of what takes microseconds
    seconds = timing.medians(timed, args, calls=calls, description=timing.shape_text(shape))
    rows = {name: row_of(name, shape, layer, seconds) for name, layer in layers.items()}
    for theirs in TORCHAO:
        add_accuracy(theirs, rows, args.device)
    return list(rows.values())


def measure_dtensors(shape: Shape, args: argparse.Namespace) -> list[Row]:
    """nn.Linear, ours and torchao's on DTensors; called on one rank."""
    mesh = init_device_mesh(args.device, (1,), mesh_dim_names=("tp",))
    names = [BF16, "tensorwise", "rowwise_folded", *TORCHAO[:1]]
    layers = {name: layer_of(name, shape, args.device, mesh) for name in names}
    timed = {name: timing.Timed(layer.run, layer.change_weight) for name, layer in layers.items()}
    seconds = timing.medians(timed, args, calls=20, description="DTensors")
    return [row_of(name, shape, layer, seconds) for name, layer in layers.items()]


def row_of(name: str, shape: Shape, layer: Layer, seconds: dict[str, float]) -> Row:
    """The times and the operators of a candidate."""
    row = Row(name, shape, seconds[name], seconds.get(f"{name}, cached"))
    layer.change_weight()
    row.operators = operators_of(layer.run)
    layer.change_weight()
    row.dispatched = dispatched_by(layer.run)
    return row


def add_accuracy(theirs: str, rows: dict[str, Row], device: str) -> None:
    """Compares a recipe of torchao and its namesake of ours with the exact products."""
    ours, shape = theirs.removeprefix("torchao "), rows[theirs].shape
    gemms = {}
    for name in (theirs, ours):
        layer = layer_of(name, shape, device)
        gemms[name] = float8_gemms(name, layer.run)
        layer.change_weight()
        results = (layer.run(), layer.x.grad, layer.module.weight.grad)
        for gemm, result in zip(GEMMS, results, strict=True):
            if gemm in gemms[theirs]:
                rows[name].decibels[gemm] = sqnr(gemms[theirs][gemm].exact(), result)
    rows[ours].same_operands = gemms[ours].keys() == gemms[theirs].keys() and all(
        product.same_as(gemms[theirs][gemm]) for gemm, product in gemms[ours].items()
    )


def layer_table(rows: Sequence[Row]) -> str:
    """The candidates at one shape."""
    header = ["layer", "step, ms", "x bf16", "faster than torchao", "micro-batch, ms"]
    header += ["dispatched", "operators", *(f"{gemm}, dB" for gemm in GEMMS), "same operands"]
    steps = {row.name: row.step for row in rows}
    lines = [
        [
            row.name,
            timing.milliseconds(row.step),
            timing.ratio(row.step, steps.get(BF16)),
            timing.ratio(steps.get(peer_of(row.name) or ""), row.step),
            timing.milliseconds(row.micro_batch),
            str(row.dispatched),
            str(row.operators),
            *(f"{row.decibels[gemm]:.2f}" if gemm in row.decibels else "" for gemm in GEMMS),
            {None: "", True: "yes", False: "NO"}[row.same_operands],
        ]
        for row in rows
    ]
    return table(header, lines, "lr")


def checks(rows: Sequence[Row]) -> list[Check]:
    """The conditions of `--assert` at the shapes that it names."""
    known = {(row.shape, row.name): row for row in rows}
    found = []
    for shape, least in LEAST_OF_TORCHAO.items():
        names = ("tensorwise", "torchao tensorwise", BF16)
        ours, theirs, bf16 = (known.get((shape, name)) for name in names)
        if ours is None or bf16 is None:
            continue
        at = timing.shape_text(shape)
        found.append(timing.check_faster(at, ours.step, theirs and theirs.step, least))
        if theirs is None:
            continue
        if shape == SPEED:
            times = ours.step / bf16.step
            limits = {f"{times:.2f}x of bf16, at most {MOST_OF_BF16}": times <= MOST_OF_BF16}
            limits["the operands are torchao's"] = bool(ours.same_operands)
            for gemm in GEMMS:
                ahead = ours.decibels[gemm] - theirs.decibels[gemm]
                limits[f"{gemm} {ahead:+.2f} dB to torchao's"] = ahead >= -timing.TOLERANCE_DB
        else:
            counted, share = ours.dispatched, ours.operators / theirs.operators
            limits = {f"{counted} operators, at most {MOST_DISPATCHED}": counted <= MOST_DISPATCHED}
            limits[f"{share:.2f} of torchao's with nested ones, at most 0.5"] = share <= 0.5
        found += [Check(f"{at}: {sentence}", holds) for sentence, holds in limits.items()]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = make_parser("scripts.bench.linear", __doc__, repeat=21, asserts="a target is missed")
    shapes = "rows x in_features x out_features; default: 512x1024x1024 16x16x16"
    default = [SPEED, OVERHEAD]
    parser.add_argument(
        "--shapes", type=timing.shape_type, nargs="+", metavar="MxKxN", default=default, help=shapes
    )
    args = start(parser, argv)
    if args.asserted and not set(default) <= set(args.shapes):
        parser.error("--assert is about 512x1024x1024 and 16x16x16: --shapes must have both")
    by_shape = {shape: measure(shape, args) for shape in args.shapes}
    blocks = {
        f"linear {timing.shape_text(shape)}": layer_table(rows) for shape, rows in by_shape.items()
    }
    rows = [row for rows in by_shape.values() for row in rows]
    smallest = min(args.shapes, key=math.prod)
    options = {"device": args.device, "threads": args.threads}
    (dtensors,) = run_on_ranks(1, measure_dtensors, smallest, args, **options)
    blocks[f"linear on DTensors {timing.shape_text(smallest)}"] = layer_table(dtensors)
    return finish(args, blocks, checks(rows))


if __name__ == "__main__":
    sys.exit(main())
