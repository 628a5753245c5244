"""Train variants of a small model that differ in one thing, from several seeds; compare losses.

    python -m scripts.train.compare_seeds --assert
    python -m scripts.train.compare_seeds --of gradients --steps 500 --assert
    python -m scripts.train.compare_seeds --of fp32-compute --steps 500 --assert
    python -m scripts.train.compare_seeds --of tensor-parallel --assert
    python -m scripts.train.compare_seeds --of experts --steps 500 --assert
    python -m scripts.train.compare_seeds --of four-bits --steps 1000 --assert

--of recipes and --of experts compare recipes with bf16, in the debug Llama and in a mixture of
experts; four-bits compares weights in e4m3 and in MXFP4; gradients and fp32-compute compare
transports of FSDP2's gradients, after a backward in bf16 and in fp32 (in 8 micro-batches, so that
the bits don't depend on the number of ranks); tensor-parallel compares transports of sums over tp.
Runs of one seed have the same weights and data. Each is a run of scripts.train.train in --out.
"""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, get_args

from tqdm import tqdm

from fp8_dist.recipe_names import ExpertsRecipe
from scripts.common.markdown import table
from scripts.common.options import positive
from scripts.common.recipes import BF16, OURS
from scripts.common.report import Check, finish, make_parser, parse

LAST_STEPS = 50
TRAIN = ("steps", "batch_size", "seq_len", "lr")  # options that every run gets
FP32, REDUCE_SCATTER = "fp32", "reduce-scatter"  # torch's

# By variant, the losses of all steps of each seed's run.
Losses = Mapping[str, list[list[float]]]


class Limit(NamedTuple):
    """The largest distance of two variants' losses: `most` %, or two standard errors if larger."""

    variant: str
    reference: str
    most: float


class Comparison(NamedTuple):
    """Runs that differ in one thing.

    Attributes:
        variants: options of scripts.train.train by name of the variant; True makes an option a
            flag. The first variant is the reference of the table.
        limits: the conditions of `--assert`.
        ranks: the ranks of each run, which torchrun starts; 1: one process, without torchrun.
    """

    variants: Mapping[str, Mapping[str, Any]]
    limits: Sequence[Limit]
    ranks: int = 1


IN_BF16: dict[str, Any] = {"recipe": BF16}
IN_FP32 = IN_BF16 | {"compute": "fp32"}
IN_PARTS = {"micro_batches": 8}  # so that one rank has the same bits as several
ON_NODES = {"gpus_per_node": 2}  # so that one node has the same bits as several
TWO_HOPS = "float8 in two hops"
OVER_TP: dict[str, Any] = {"recipe": "tensorwise", "tp": 2}
COMPARISONS = {
    "recipes": Comparison(
        {name: {"recipe": name} for name in (BF16, *OURS)},
        [
            *(Limit(name, BF16, 0.3 if name in ("blockwise", "mxfp8") else 1.0) for name in OURS),
            Limit("rowwise_folded", "rowwise", 0.3),
        ],
    ),
    "experts": Comparison(
        {name: {"model": "moe", "recipe": name} for name in (BF16, *get_args(ExpertsRecipe))},
        [Limit(name, BF16, 0.3) for name in get_args(ExpertsRecipe)],
    ),
    "four-bits": Comparison(
        {
            ", ".join([recipe, *more.values()]): {"recipe": recipe} | more
            for recipe in ("mxfp8", "blockwise")
            for more in ({}, {"weight_format": "mxfp4"})
        },
        [Limit(f"{recipe}, mxfp4", recipe, 1.0) for recipe in ("mxfp8", "blockwise")],
    ),
    # (Not with bf16 transport, which does not round gradients of a bf16 backward.)
    "gradients": Comparison(
        {
            name: IN_PARTS | IN_BF16 | {"gradient_transport": how} | more
            for name, how, more in (
                (FP32, FP32, {}),
                ("float8", "float8", {}),
                (TWO_HOPS, "float8", ON_NODES),
                (f"{TWO_HOPS}, bf16 within nodes", "float8", ON_NODES | {"within_nodes": "bf16"}),
            )
        },
        [Limit("float8", FP32, 0.5), Limit(TWO_HOPS, FP32, 0.5)],
        ranks=2,
    ),
    "fp32-compute": Comparison(
        {how: IN_PARTS | IN_FP32 | {"gradient_transport": how} for how in (FP32, "bf16")},
        [Limit("bf16", FP32, 0.3)],
    ),
    # (Not with bf16 transport: the sum of two bf16 numbers has the same bits either way.)
    "tensor-parallel": Comparison(
        {REDUCE_SCATTER: OVER_TP, "float8": OVER_TP | {"reduce_transport": "float8"}},
        [Limit("float8", REDUCE_SCATTER, 0.5)],
        ranks=2,
    ),
}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The options; errors end the process with status 2, before any run starts."""
    asserts = "the loss of a variant is too far from that of its reference"
    parser = make_parser("scripts.train.compare_seeds", __doc__, asserts=asserts)
    add = parser.add_argument
    add("--of", choices=COMPARISONS, default="recipes", help="what differs; %(default)s")
    add("--only", nargs="+", metavar="NAME", help="these variants, beside the first one")
    add("--steps", type=positive, default=300, help="default: %(default)s")
    add("--seeds", type=positive, default=5, help="runs of each variant, at least 2")
    add("--batch-size", type=positive, default=8, help="rows of a batch")
    add("--seq-len", type=positive, default=64, help="tokens (bytes) per row")
    # With so few tokens per step, the default of scripts.train.train (1e-3) is at the edge of
    # stability: runs that differ by a rounding drift apart twice as far as with this rate.
    add("--lr", type=float, default=5e-4, help="peak of the learning rate")
    add("--jobs", type=positive, help="runs at a time; default: as many as there are cores for")
    add("--out", type=Path, default=Path("runs/seeds"), help="folder of the runs; %(default)s")
    args = parse(parser, argv)
    variants, ranks = COMPARISONS[args.of].variants, COMPARISONS[args.of].ranks
    args.only = args.only or [*variants]
    if unknown := [name for name in args.only if name not in variants]:
        parser.error(f"--only: there is no {', '.join(unknown)} in {', '.join(variants)}")
    if args.seeds < 2:
        parser.error("--seeds must be at least 2: differences have a standard error")
    parts = max([ranks, *(options.get("micro_batches", 1) for options in variants.values())])
    if args.batch_size % parts:
        parser.error(f"--batch-size must be a multiple of the {parts} ranks or micro-batches")
    args.jobs = args.jobs or max((os.cpu_count() or 1) // ranks, 1)
    return args


def losses_of(args: argparse.Namespace) -> Losses:
    """Train every variant from every seed, one seed after the other, `--jobs` runs at a time."""
    variants = COMPARISONS[args.of].variants
    names = [name for i, name in enumerate(variants) if i == 0 or name in args.only]
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            (name, pool.submit(train, args, name, seed))
            for seed in range(args.seeds)
            for name in names
        ]
        try:
            for future in tqdm(as_completed(run for _, run in runs), total=len(runs), unit="run"):
                future.result()  # the first error ends the comparison
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {name: [run.result() for whose, run in runs if whose == name] for name in names}


def train(args: argparse.Namespace, name: str, seed: int) -> list[float]:
    """Train a variant, and return the loss of every step.

    Raises:
        SystemExit: the run failed.
    """
    compared = COMPARISONS[args.of]
    out = args.out / args.of / f"{name.replace(', ', '_').replace(' ', '_')}-{seed}"
    given = {option: getattr(args, option) for option in TRAIN} | {"seed": seed, "out": out}
    command = [sys.executable, "-m"]
    if compared.ranks > 1:
        launcher = "torch.distributed.run"
        command += [launcher, "--standalone", f"--nproc-per-node={compared.ranks}", "-m"]
    command.append("scripts.train.train")
    for option, value in {**given, **compared.variants[name]}.items():
        text = f"--{option.replace('_', '-')}"
        command.append(text if value is True else f"{text}={value}")
    # gloo needs an address that it can reach. The ranks share a machine, so loopback will do.
    loopback = import_module("scripts.common.ranks").LOOPBACK
    address = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback)}
    environment = os.environ | address | {"OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} did not end well:\n{done.stderr[-2000:]}")
    return [float(json.loads(line)["loss"]) for line in (out / "metrics.jsonl").open()]


def last_loss(losses: list[float]) -> float:
    """The mean loss of the last `LAST_STEPS` steps, or of all if there are fewer."""
    return statistics.fmean(losses[-LAST_STEPS:])


def differences(losses: Losses, variant: str, reference: str) -> list[float]:
    """The relative differences of the last losses of two variants, in %, by seed."""
    pairs = zip(losses[variant], losses[reference], strict=True)
    return [100 * (last_loss(one) / last_loss(other) - 1) for one, other in pairs]


def standard_error(percent: Sequence[float]) -> float:
    """The standard error of the mean of differences. (statistics.stdev fails if one is NaN.)"""
    mean, count = statistics.fmean(percent), len(percent)
    return math.sqrt(sum((value - mean) ** 2 for value in percent) / (count - 1) / count)


def results_table(losses: Losses) -> str:
    """A table of the mean loss of each variant, and its difference from the first one."""
    reference, lines = next(iter(losses)), []
    for variant, runs in losses.items():
        cells = ["", "", ""]
        if variant != reference:
            percent = differences(losses, variant, reference)
            spread = f"{min(percent):+.3f} % to {max(percent):+.3f} %"
            mean, error = statistics.fmean(percent), standard_error(percent)
            cells = [f"{mean:+.3f} %", f"{error:.3f} %", spread]
        lines.append([variant, f"{statistics.fmean(map(last_loss, runs)):.4f}", *cells])
    head = ["variant", f"loss, last {LAST_STEPS} steps", f"difference to {reference}"]
    return table([*head, "its standard error", "of single seeds"], lines, "lr")


def checks(losses: Losses, limits: Sequence[Limit]) -> list[Check]:
    """The conditions of `--assert`. (Written so that a NaN breaks them.)"""
    conditions = []
    for variant, reference, most in limits:
        if variant in losses and reference in losses:
            percent = differences(losses, variant, reference)
            most, mean = max(most, 2 * standard_error(percent)), statistics.fmean(percent)
            sentence = f"{variant} to {reference}: {mean:+.3f} %, at most {most:.3g} %"
            conditions.append(Check(sentence, bool(abs(mean) <= most)))
    return conditions


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    losses = losses_of(args)
    conditions = checks(losses, COMPARISONS[args.of].limits)
    return finish(args, {f"losses by {args.of}": results_table(losses)}, conditions)


if __name__ == "__main__":
    sys.exit(main())
