"""Trains a Llama on this machine's GPU in bf16 and in float8, eager and compiled, for some seconds.

    python -m scripts.bench.gpu_train

A stage of a day (see gpu_results). Each run is `scripts.train.train` in a process of its own, which
imports while the one before trains: the same weights, text and number of steps in all recipes.
Readings are the steps behind the first ones, on the host's clock, which waits for each.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from scripts.bench.gpu import Case, Found, Variant, case, label, make_parser, run_stage
from scripts.bench.gpu_results import ROOT, Result
from scripts.common.candidates import BF16
from scripts.common.llama import MODELS
from scripts.common.options import positive

# The most wanted first: a stage may be stopped at any time.
RUNS: tuple[Variant, ...] = (
    (BF16, False),
    ("tensorwise", False),
    ("rowwise_folded", False),
    ("tensorwise", True),
    (BF16, True),
    ("rowwise_folded", True),
)
WARM_UP = 5
# The options come by stdin, when it is this process's turn.
PROGRAM = "from scripts.train.train import leave, main; leave(main(input().split('\\t')))"


class Child(NamedTuple):
    """A process that is ready to train, and the folder for what it writes and prints."""

    process: subprocess.Popen[str]
    folder: tempfile.TemporaryDirectory[str]


def started() -> Child:
    """Start a process, which imports and waits."""
    folder = tempfile.TemporaryDirectory()
    command, stdin = [sys.executable, "-c", PROGRAM], subprocess.PIPE
    with Path(folder.name, "log").open("w") as log:  # no pipe: compilers may hold it for longer
        process = subprocess.Popen(
            command, stdin=stdin, stdout=log, stderr=log, text=True, cwd=ROOT
        )
    return Child(process, folder)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Each run."""
    waiting: list[Child] = []
    tokens = args.batch_size * args.seq_len
    about = {"shape": f"{args.model}, {args.batch_size} x {args.seq_len} tokens", "tokens": tokens}
    for variant in RUNS:
        known = Result(recipe=variant[0], compiled=variant[1], **about)
        yield case(label(variant), known, partial(trained, args, variant, waiting), set())
    for child in waiting:
        child.process.kill()


def trained(args: argparse.Namespace, variant: Variant, waiting: list[Child]) -> Found:
    """Train, for so many seconds at most; what came of it so far counts."""
    process, folder = waiting.pop() if waiting else started()
    words = [f"--recipe={variant[0]}", f"--out={folder.name}", *["--compile"] * variant[1]]
    for name in ("model", "steps", "batch_size", "seq_len", "lr", "warmup"):
        words.append(f"--{name.replace('_', '-')}={getattr(args, name)}")
    with suppress(BrokenPipeError):  # it has ended: its log says why
        print("\t".join(words), file=process.stdin, flush=True)
    waiting.append(started())
    try:
        status = process.wait(args.seconds)
        ended = f"exit status {status}: " if status else ""
    except subprocess.TimeoutExpired:
        ended, status = f"stopped after {args.seconds:g} s: ", 0
    finally:
        process.kill()
        process.wait()
    with folder as path:
        lines = {file.name: file.read_text().splitlines() for file in Path(path).iterdir()}
    rows = [json.loads(line) for line in lines.get("metrics.jsonl", []) if line.endswith("}")]
    if status or len(rows) <= WARM_UP:
        said = " | ".join(line for line in lines["log"] if line.strip())
        raise RuntimeError(f"{ended}{len(rows)} steps; {said[-160:]}")
    return summary(rows, ended, args.batch_size * args.seq_len)


def summary(rows: Sequence[dict[str, float]], ended: str, tokens: int) -> Found:
    """The steps' times, the peak, and losses on the way."""
    told = sorted({len(rows) * part // 4 for part in (1, 2, 3, 4)})
    losses = ", ".join(f"{rows[n - 1]['loss']:.4f} after {n}" for n in told)
    return {
        "readings": tuple(tokens / row["tokens_per_second"] for row in rows[WARM_UP:]),
        "peak": int(max(row["memory_bytes"] for row in rows)),
        "note": f"{ended}loss {losses} steps",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = make_parser("scripts.bench.gpu_train", __doc__, "training", repeat=1)
    add = parser.add_argument
    add("--seconds", type=float, default=30.0, help="of a run; %(default)s")
    add("--model", choices=MODELS, default="1b", help="size of the Llama; %(default)s")
    add("--steps", type=positive, default=50, help="of each run; %(default)s")
    add("--batch-size", type=positive, default=8, help="rows; %(default)s")
    add("--seq-len", type=positive, default=512, help="tokens of a row; %(default)s")
    add("--lr", type=float, default=5e-4, help="peak; %(default)s")
    add("--warmup", type=int, default=10, help="steps until the peak; %(default)s")
    return run_stage(parser, argv, cases)


if __name__ == "__main__":
    sys.exit(main())
