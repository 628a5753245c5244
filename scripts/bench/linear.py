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
* at 16 x 16 x 16, where all is overhead, a step takes at most half of torchao's.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence

import torch

from scripts.bench import timing
from scripts.bench.layers import Shape, layer_of
from scripts.common.candidates import BF16, OURS, TORCHAO, peer_of
from scripts.common.gemms import GEMMS, float8_gemms
from scripts.common.markdown import table
from scripts.common.metrics import sqnr
from scripts.common.report import Check, finish, make_parser, start

SPEED, OVERHEAD = (512, 1024, 1024), (16, 16, 16)
HAS_AMX = torch.cpu._is_amx_tile_supported()
MOST_OF_BF16 = 2.5 if HAS_AMX else 2.0
LEAST_OF_TORCHAO = {SPEED: 2.5 if HAS_AMX else 3.0, OVERHEAD: 2.0}


@dataclasses.dataclass
class Row:
    """What is measured of a candidate at a shape; None: it does not apply."""

    name: str
    shape: Shape
    step: float  # seconds
    micro_batch: float | None = None  # seconds
    # Of each GEMM's result, to the exact product of torchao's operands; whether these are ours too.
    decibels: dict[str, float] = dataclasses.field(default_factory=dict)
    same_operands: bool | None = None


def measure(shape: Shape, args: argparse.Namespace) -> list[Row]:
    """All candidates at one shape."""
    timed = {}
    for name in (BF16, *OURS, *TORCHAO):
        layer = layer_of(name, shape, args.device)
        timed[name] = timing.Timed(layer.run, layer.change_weight)
        if name in OURS:
            cached = layer_of(name, shape, args.device)
            timed[f"{name}, cached"] = timing.Timed(cached.run, cached.clear)
    calls = max(1, min(50, 10**7 // math.prod(shape)))  # of what takes microseconds
    seconds = timing.medians(timed, args, calls=calls, description=timing.shape_text(shape))
    rows = {
        name: Row(name, shape, seconds[name], seconds.get(f"{name}, cached"))
        for name in (BF16, *OURS, *TORCHAO)
    }
    for theirs in TORCHAO:
        add_accuracy(theirs, rows, args.device)
    return list(rows.values())


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
    header += [*(f"{gemm}, dB" for gemm in GEMMS), "same operands"]
    steps = {row.name: row.step for row in rows}
    lines = [
        [
            row.name,
            timing.milliseconds(row.step),
            timing.ratio(row.step, steps.get(BF16)),
            timing.ratio(steps.get(peer_of(row.name) or ""), row.step),
            timing.milliseconds(row.micro_batch),
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
        if theirs is None or shape != SPEED:
            continue
        times = ours.step / bf16.step
        limits = {f"{times:.2f}x of bf16, at most {MOST_OF_BF16}": times <= MOST_OF_BF16}
        limits["the operands are torchao's"] = bool(ours.same_operands)
        for gemm in GEMMS:
            ahead = ours.decibels[gemm] - theirs.decibels[gemm]
            limits[f"{gemm} {ahead:+.2f} dB to torchao's"] = ahead >= -timing.TOLERANCE_DB
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
    by_shape = {f"linear {timing.shape_text(s)}": measure(s, args) for s in args.shapes}
    rows = [row for rows in by_shape.values() for row in rows]
    tables = {title: layer_table(rows) for title, rows in by_shape.items()}
    return finish(args, tables, checks(rows))


if __name__ == "__main__":
    sys.exit(main())
