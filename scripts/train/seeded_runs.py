"""Comparisons of trainings over several seeds: their options, their runs, their table.

Every training is a run of scripts.train.train. A seed gives it its weights and its data, so that
the runs of one seed differ in their variant alone: differences are taken between these.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from scripts.common.markdown import table
from scripts.common.options import positive
from scripts.common.ranks import LOOPBACK
from scripts.common.report import Check, finish, make_parser, start

LAST_STEPS = 50
TRAIN = ("steps", "batch_size", "seq_len", "lr")  # options that every run gets

# The losses of all steps of each seed's run, by variant.
Losses = Mapping[str, list[list[float]]]


class Limit(NamedTuple):
    """How far a variant's loss may be from another's, in %."""

    variant: str
    reference: str
    most: float
    noise: bool = False  # two standard errors, if that is more


class Comparison(NamedTuple):
    """Runs that differ in one thing.

    Attributes:
        what: the variants are; the head of their column.
        variants: options of scripts.train.train by name, where True is a flag. The first one is the
            reference of the table.
        limits: of `--assert`.
        ranks: of each run, started by torchrun; 1: a process without it.
    """

    what: str
    variants: Mapping[str, Mapping[str, Any]]
    limits: Sequence[Limit]
    ranks: int = 1


def options_parser(
    module: str, description: str | None, *, steps: int, ranks: int, out: str
) -> argparse.ArgumentParser:
    """A parser with the options of the runs; the keywords are defaults, for runs of `ranks`."""
    asserts = "the loss of a variant is too far from that of its reference"
    parser = make_parser(module, description, asserts=asserts)
    add = parser.add_argument
    add("--steps", type=positive, default=steps)
    add("--seeds", type=positive, default=5, help="runs of each variant, at least 2")
    add("--batch-size", type=positive, default=8, help="rows of a batch")
    add("--seq-len", type=positive, default=64, help="tokens (bytes) per row")
    # With so few tokens per step scripts.train.train's 1e-3 is at the edge of stability, where runs
    # that differ in a rounding drift apart, and twice as far as with this one.
    add("--lr", type=float, default=5e-4, help="peak of the learning rate")
    jobs = max((os.cpu_count() or 1) // ranks, 1)
    add("--jobs", type=positive, default=jobs, help="runs at a time; default: %(default)s")
    add("--out", type=Path, default=Path(out), help="folder of the runs")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; errors end the process with status 2, before any run starts."""
    args = start(parser, argv)
    if args.seeds < 2:
        parser.error("--seeds must be at least 2: differences have a standard error")
    return args


def compare(args: argparse.Namespace, compared: Comparison) -> int:
    """Train, print the table and the checks; return the exit status."""
    losses = losses_of(args, compared)
    return finish(args, {"losses": results_table(losses, compared)}, checks(losses, compared))


def losses_of(args: argparse.Namespace, compared: Comparison) -> Losses:
    """Trains every variant from every seed, `--jobs` runs at a time: one seed after the other."""
    variants = compared.variants
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            (name, pool.submit(train, args, name, options, seed, compared.ranks))
            for seed in range(args.seeds)
            for name, options in variants.items()
        ]
        try:
            for future in tqdm(as_completed(run for _, run in runs), total=len(runs), unit="run"):
                future.result()  # an error ends it all
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {name: [run.result() for whose, run in runs if whose == name] for name in variants}


def train(
    args: argparse.Namespace, name: str, options: Mapping[str, Any], seed: int, ranks: int = 1
) -> list[float]:
    """Trains a variant, and returns the loss of every step.

    Raises:
        SystemExit: the run did not end well.
    """
    out = args.out / f"{name.replace(', ', '_').replace(' ', '_')}-{seed}"
    given = {name: getattr(args, name) for name in TRAIN} | {"seed": seed, "out": out, **options}
    arguments = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in given.items()
    ]
    _run(arguments, ranks, args.threads)
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").open()]


def _run(arguments: list[str], ranks: int, threads: int) -> None:
    command = [sys.executable, "-m"]
    if ranks > 1:
        launcher = "torch.distributed.run"
        command += [launcher, "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command += ["scripts.train.train", *arguments]
    # Ranks of one machine need an address that they can reach.
    address = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK)}
    environment = os.environ | address | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} did not end well:\n{done.stderr[-2000:]}")


def last_loss(losses: list[float]) -> float:
    """The mean of the last steps, or of all if there are fewer."""
    return statistics.fmean(losses[-LAST_STEPS:])


def differences(losses: Losses, variant: str, reference: str) -> np.ndarray:
    """Differences of the last losses of two variants, in %, by seed."""
    values, references = (np.array([*map(last_loss, losses[v])]) for v in (variant, reference))
    return 100 * (values / references - 1)


def difference(losses: Losses, variant: str, reference: str) -> tuple[float, float]:
    """The mean of the differences over seeds, and its standard error."""
    percent = differences(losses, variant, reference)
    return float(percent.mean()), float(percent.std(ddof=1)) / len(percent) ** 0.5


def results_table(losses: Losses, compared: Comparison) -> str:
    """The mean loss of each variant and its difference to the first one."""
    reference, lines = next(iter(losses)), []
    for variant, runs in losses.items():
        cells = ["", "", ""]
        if variant != reference:
            percent = differences(losses, variant, reference)
            mean, error = difference(losses, variant, reference)
            spread = f"{percent.min():+.3f} % to {percent.max():+.3f} %"
            cells = [f"{mean:+.3f} %", f"{error:.3f} %", spread]
        lines.append([variant, f"{statistics.fmean(map(last_loss, runs)):.4f}", *cells])
    head = [compared.what, f"loss, last {LAST_STEPS} steps", f"difference to {reference}"]
    return table([*head, "its standard error", "of single seeds"], lines, "lr")


def checks(losses: Losses, compared: Comparison) -> list[Check]:
    """The conditions of `--assert`. (Written so that a NaN breaks them.)"""
    found = []
    for variant, reference, most, noise in compared.limits:
        mean, error = difference(losses, variant, reference)
        most = max(most, 2 * error) if noise else most
        sentence = f"{variant} to {reference}: {mean:+.3f} %, at most {most:.3g} %"
        found.append(Check(sentence, abs(mean) <= most))
    return found
