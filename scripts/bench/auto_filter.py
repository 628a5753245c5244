"""Measures which linear layers gain from float8 on this machine, for `fp8_dist.auto_filter`.

    python -m scripts.bench.auto_filter --recipe tensorwise --compile --json h100.json

Times LayerNorm -> Linear(K, N) -> sigmoid on M rows, forward and backward in bf16, with a float8
linear layer against a bf16 one, over a grid of M, K and N. Without a float8 GEMM (CPUs) float8 is
emulated, and slower at every size.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from fp8_dist import auto_filter
from scripts.bench import timing
from scripts.common.candidates import BF16, OURS
from scripts.common.markdown import table
from scripts.common.models import convert
from scripts.common.options import positive
from scripts.common.report import finish, make_parser, start

# --rows (M) and --sizes (K and N) by device.
DEFAULTS = {
    "cpu": ([64, 128], [64, 128, 256]),
    "cuda": ([4096, 8192, 16384], [1024, 2048, 4096, 8192, 16384]),
}
STEPS = 5  # in one reading of the clock


def steps_of(
    name: str, shape: tuple[int, int, int], compiled: bool, device: str
) -> Callable[[], None]:
    """Several steps, forward and backward, of a candidate at one (M, K, N)."""
    m, k, n = shape
    torch.manual_seed(0)
    at: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    model = nn.Sequential(nn.LayerNorm(k, **at), nn.Linear(k, n, bias=False, **at), nn.Sigmoid())
    convert(name, model)
    x = torch.randn(m, k, **at).requires_grad_()
    gradient = torch.randn(m, n, **at)
    call = torch.compile(model, dynamic=False) if compiled else model

    def steps() -> None:
        for _ in range(STEPS):  # without waiting for a GPU in between
            call(x).backward(gradient)
            x.grad = None
            model.zero_grad()

    return steps


def measure(shape: tuple[int, int, int], args: argparse.Namespace) -> dict[str, Any]:
    """The medians at one (M, K, N)."""
    torch._dynamo.reset()  # each shape has graphs of its own
    names = {"bf16": BF16, "float8": args.recipe}
    steps = partial(steps_of, shape=shape, compiled=args.compile, device=args.device)
    timed = {name: timing.Timed(steps(candidate)) for name, candidate in names.items()}
    seconds = {name: s / STEPS for name, s in timing.medians(timed, args).items()}
    row = dict(zip("mkn", shape, strict=True))
    return row | seconds | {"speedup": seconds["bf16"] / seconds["float8"]}


def speedup_table(rows: Sequence[dict[str, Any]], recipe: str, least: float) -> str:
    """A row per K and N, and whether the default filter agrees with what was measured.

    The speedups are those at the M that gains least.
    """
    worst: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        at = row["k"], row["n"]
        worst[at] = min(worst.get(at, row), row, key=lambda each: each["speedup"])
    header = ["K (in)", "N (out)", "least at M", "bf16, ms", "float8, ms", "speedup", "auto_filter"]
    lines = []
    for (k, n), row in worst.items():
        admitted = auto_filter(recipe)(nn.Linear(k, n, device="meta"), "")
        gains = row["speedup"] >= least
        verdict = "converts" if admitted else "skips"
        verdict += "" if admitted == gains else ", but gains" if gains else ", but loses"
        times = [timing.milliseconds(row["bf16"]), timing.milliseconds(row["float8"])]
        speedup = timing.ratio(row["bf16"], row["float8"])
        lines.append([str(k), str(n), str(row["m"]), *times, speedup, verdict])
    return table(header, lines, "rrrrrrl")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = make_parser("scripts.bench.auto_filter", __doc__, None, repeat=15)
    rows, sizes = DEFAULTS["cuda" if torch.cuda.is_available() else "cpu"]
    add = parser.add_argument
    add("--recipe", choices=OURS, default="tensorwise")
    add("--rows", type=positive, nargs="+", metavar="M", default=rows, help="default: %(default)s")
    add("--sizes", type=positive, nargs="+", default=sizes, help="of K and N; default: %(default)s")
    add("--compile", action="store_true", help="torch.compile both, as in training")
    add("--least", type=float, default=1.0, help="speedup that counts as a gain")
    args = start(parser, argv)
    if any(size % 16 for size in args.sizes):
        parser.error("--sizes must be multiples of 16")
    grid = list(itertools.product(args.rows, args.sizes, args.sizes))
    found = [measure(shape, args) for shape in tqdm(grid, desc=args.recipe, unit="shape")]
    title = f"{args.recipe} against bf16, {'compiled' if args.compile else 'eager'}"
    data = [row | {"recipe": args.recipe, "compiled": args.compile} for row in found]
    return finish(args, {title: speedup_table(found, args.recipe, args.least)}, data=data)


if __name__ == "__main__":
    sys.exit(main())
