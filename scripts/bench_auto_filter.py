"""Measures which linear layers gain from float8 on this machine, for `fp8_dist.auto_filter`.

    python scripts/bench_auto_filter.py --recipe tensorwise --compile --json h100.json

Times LayerNorm -> Linear(K, N) -> sigmoid on M rows, forward and backward in bf16, with a float8
linear layer against a bf16 one, over a grid of M, K and N. Without a float8 GEMM (CPUs) float8 is
emulated, and slower at every size.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmarks import Timed, make_parser, medians, positive, start
from torch import nn
from tqdm import tqdm

from fp8_dist import (
    Float8LinearConfig,
    Float8LinearRecipeName,
    auto_filter,
    convert_to_float8_training,
)

# --rows (M) and --sizes (K and N) by device.
DEFAULTS = {
    "cpu": ([64, 128], [64, 128, 256]),
    "cuda": ([4096, 8192, 16384], [1024, 2048, 4096, 8192, 16384]),
}
STEPS = 5  # in one reading of the clock


def step_of(
    m: int, k: int, n: int, recipe: str | None, compiled: bool, device: torch.device
) -> Callable[[], None]:
    """One forward and backward; `recipe` None is bf16. Both start from the same seed."""
    torch.manual_seed(0)
    at: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    model = nn.Sequential(nn.LayerNorm(k, **at), nn.Linear(k, n, bias=False, **at), nn.Sigmoid())
    if recipe is not None:
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    x = torch.randn(m, k, **at).requires_grad_()
    gradient = torch.randn(m, n, **at)
    call = torch.compile(model, dynamic=False) if compiled else model

    def step() -> None:
        call(x).backward(gradient)
        x.grad = None
        model.zero_grad()

    return step


def several(step: Callable[[], None]) -> None:
    """Steps in a row, which a GPU is not waited for between."""
    for _ in range(STEPS):
        step()


def measure(shape: tuple[int, int, int], args: argparse.Namespace) -> dict[str, Any]:
    """The medians at one (M, K, N)."""
    m, k, n = shape
    torch._dynamo.reset()  # each shape has graphs of its own
    recipes = {"bf16": None, "float8": args.recipe}
    timed = {}
    for name, recipe in recipes.items():
        step = step_of(m, k, n, recipe, args.compile, args.device)
        timed[name] = Timed(partial(several, step))
    seconds = medians(timed, args)
    bf16, float8 = (1e3 * seconds[name] / STEPS for name in recipes)
    row = {"m": m, "k": k, "n": n, "bf16_ms": bf16, "float8_ms": float8}
    return row | {"speedup": bf16 / float8}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'M':>7}{'K (in)':>8}{'N (out)':>9}{'bf16 ms':>10}{'float8 ms':>11}{'speedup':>9}"]
    for row in rows:
        times = f"{row['bf16_ms']:>10.3f}{row['float8_ms']:>11.3f}{row['speedup']:>9.2f}"
        lines.append(f"{row['m']:>7}{row['k']:>8}{row['n']:>9}{times}")
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]], recipe: str, least: float) -> str:
    """For each N, from which K on a layer gains, and where auto_filter decides otherwise."""
    speedups: dict[tuple[int, int], float] = {}  # at the M that gains least
    for row in rows:
        at = row["k"], row["n"]
        speedups[at] = min(row["speedup"], speedups.get(at, row["speedup"]))
    ks, ns = (sorted(set(sizes)) for sizes in zip(*speedups, strict=True))
    lines = [f"Layers that gain (speedup of {least:g} or more at every M measured):"]
    for n in ns:
        # The smallest K from which on every larger one gains too.
        gaining = list(itertools.takewhile(lambda k, n=n: speedups[k, n] >= least, ks[::-1]))
        lines.append(f"  N = {n}: " + (f"K >= {gaining[-1]}" if gaining else "none"))
    lines.append(f"auto_filter({recipe!r}) decides otherwise about:")
    end = len(lines)
    for (k, n), speedup in speedups.items():
        admitted = auto_filter(recipe)(nn.Linear(k, n, device="meta"), "")
        if admitted != (speedup >= least):
            verdict = "converted" if admitted else "skipped"
            lines.append(f"  K = {k}, N = {n}: {verdict}, speedup {speedup:.2f}")
    return "\n".join(lines if len(lines) > end else [*lines, "  none"])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, repeat=15, page=None)
    names = [name.value for name in Float8LinearRecipeName]
    rows, sizes = DEFAULTS["cuda" if torch.cuda.is_available() else "cpu"]
    add = parser.add_argument
    add("--recipe", choices=names, default="tensorwise")
    add("--rows", type=positive, nargs="+", metavar="M", default=rows, help="default: %(default)s")
    add("--sizes", type=positive, nargs="+", default=sizes, help="of K and N; default: %(default)s")
    add("--compile", action="store_true", help="torch.compile both, as in training")
    add("--least", type=float, default=1.0, help="speedup that counts as a gain")
    args = start(parser, argv)
    if any(size % 16 for size in args.sizes):
        parser.error("--sizes must be multiples of 16")
    return args


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(argv)
    grid = list(itertools.product(args.rows, args.sizes, args.sizes))
    rows = [measure(shape, args) for shape in tqdm(grid, desc=args.recipe, unit="shape")]
    name = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else "CPU"
    mode = "compiled" if args.compile else "eager"
    print(f"{args.recipe} against bf16, {mode}, {name}, torch {torch.__version__}")
    print(f"{table(rows)}\n\n{summary(rows, args.recipe, args.least)}")
    if args.json is not None:
        head = {"recipe": args.recipe, "mode": mode, "device": name, "torch": torch.__version__}
        args.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
