"""Train a small Llama in bf16 and in float8, from the same seed, and compare the runs.

A third run also sends gradients, and the sums of tensor parallelism, in float8.

Takes the options of scripts.train.train, which apply to all runs. The default is four ranks on this
machine: FSDP2 (--dp 2) x tensor parallelism with sequence parallelism (--tp 2). --recipe is the
float8 recipe to compare with bf16. If transports are given, the float8 run uses them, and there is
no third run. --out (default: runs/quickstart in the repository) gets a folder for each run, and the
comparison.
"""

import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.common.recipes import BF16
from scripts.train import compare
from scripts.train.options import make_parser, parse_options

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = {
    "dp": 2,
    "tp": 2,
    "recipe": "tensorwise",
    # Fewer tokens per step than by default: steps are short, and weights are more of the bytes.
    "batch_size": 8,
    "seq_len": 96,
    # A lower rate than by default: at 1e-3 gradients spike, after which the losses of runs that
    # differ in rounding alone are up to 1% apart.
    "lr": 6e-4,
    "steps": 80,
    "stats_every": 10,
    "out": ROOT / "runs/quickstart",
}

# The baseline casts and sends nothing in float8.
IN_BF16: dict[str, Any] = {"recipe": BF16, "stats_every": None, "record": None}
IN_BF16 |= {"gradient_transport": None, "reduce_transport": None}


def parse_args(argv: list[str]) -> Namespace:
    """Check the options once, before any rank starts; errors end the process with status 2."""
    parser = make_parser("quickstart.sh", __doc__)
    parser.set_defaults(**DEFAULTS)
    asked = parser.parse_args(argv)
    if asked.recipe == BF16:
        parser.error(
            f"--recipe {BF16} is what the float8 recipe is compared with: name a float8 one"
        )
    return parse_options(parser, argv, world_size=asked.dp * asked.ep * asked.tp)


def runs_of(args: Namespace) -> list[Namespace]:
    """The options of each run, which is called by the last part of its `out`."""
    changes: dict[str, dict[str, Any]] = {BF16: IN_BF16, args.recipe: {}}
    given = args.gradient_transport or args.reduce_transport
    if not given and args.model != "moe" and args.dp > 1 and args.tp > 1:
        sums = {"gradient_transport": "float8", "reduce_transport": "float8"}
        changes[f"{args.recipe}-float8-sums"] = sums
    return [Namespace(**vars(args) | c | {"out": args.out / n}) for n, c in changes.items()]


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    ranks = args.dp * args.ep * args.tp
    train_run = import_module("scripts.train.train_run")
    run_on_ranks = import_module("scripts.common.ranks").run_on_ranks
    device, reason = train_run.choose_device(0, ranks)
    runs = runs_of(args)
    names = ", ".join(run.out.name for run in runs)
    print(f"== training {names}: {train_run.described(args, device, reason)}", flush=True)
    for run in runs:
        run_on_ranks(ranks, train_run.train_rank, run, device=device.type)
    print("== drawing the report", flush=True)
    # The verdict decides the exit status only with the default options: other runs may be too
    # short to learn anything.
    asserted = [] if argv else ["--assert"]
    return compare.main([*(str(run.out) for run in runs), "--out", str(args.out), *asserted])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
