"""The options of a training run: their parser, and every check that needs no process group."""

import argparse
import math
import os
from pathlib import Path

from scripts.common.candidates import BF16, RECIPES
from scripts.common.corpus import load_corpus
from scripts.common.llama import MODELS

AT_LEAST_ONE = ("tp", "steps", "batch_size", "seq_len")


def positive(text: str) -> int:
    """The type of options that count something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def command_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m MODULE`; names of options must be given in full."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def make_parser(description: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of the training options; names must be given in full.

    prog: what usage and errors call the program; None: the script's name.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, flag = parser.add_argument, argparse.BooleanOptionalAction
    add("--model", choices=MODELS, default="debug", help="size of the Llama")
    add("--recipe", choices=RECIPES, default=BF16, help="bf16, or a float8 recipe")
    add("--dp", type=int, help="data-parallel (FSDP2) ranks; default: all that --tp leaves")
    add("--tp", type=int, default=1, help="tensor-parallel ranks")
    add("--sequence-parallel", action=flag, help="default: on when --tp is above 1")
    add("--compile", action="store_true", help="torch.compile each transformer block")
    add("--steps", type=int, default=120)
    add("--batch-size", type=int, default=16, help="rows of the global batch, over all ranks")
    add("--seq-len", type=int, default=128, help="tokens (bytes) per row")
    add("--lr", type=float, default=1e-3, help="peak; falls linearly to 0 after the warmup")
    add("--warmup", type=int, default=40, help="steps in which --lr is reached linearly")
    add("--seed", type=int, default=0, help="of weights and data")
    add("--out", type=Path, help="folder of metrics and tables; default: runs/RECIPE")
    add("--data", type=Path, help="file or folder; default: Python's standard library source")
    return parser


def parse_options(
    parser: argparse.ArgumentParser, argv: list[str] | None, world_size: int | None = None
) -> argparse.Namespace:
    """Parses and checks the options.

    Errors end the process with status 2. Every rank decides alike: only the options, the number
    of ranks and the file system are looked at.

    Args:
        parser: what `make_parser` returned, perhaps with other defaults.
        argv: None: the process's own arguments.
        world_size: how many ranks there are; None: as torchrun says, else 1.

    Returns:
        The options, defaults filled in, with the text as `corpus`.
    """
    args = parser.parse_args(argv)
    if world_size is None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
    _check_numbers(parser, args)
    _check_mesh(parser, args, world_size)
    args.out = args.out or Path("runs") / args.recipe
    _check_out(parser, args.out)
    try:
        args.corpus = load_corpus(args.data, seq_len=args.seq_len)
    except ValueError as error:
        parser.error(f"--data: {error}")
    return args


def _check_numbers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name in AT_LEAST_ONE:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.warmup < 0:
        parser.error(f"--warmup must not be negative, got {args.warmup}")
    if not (args.lr > 0 and math.isfinite(args.lr)):
        parser.error(f"--lr must be positive and finite, got {args.lr}")
    if not 0 <= args.seed < 2**31:
        parser.error(f"--seed must lie in [0, 2**31), got {args.seed}")


def _check_mesh(parser: argparse.ArgumentParser, args: argparse.Namespace, world_size: int) -> None:
    """Checks what the two axes must divide; fills in --dp and --sequence-parallel."""
    if args.dp is None:
        args.dp = max(world_size // args.tp, 1)
    if args.dp < 1:
        parser.error("--dp must be at least 1")
    if args.dp * args.tp != world_size:
        parser.error(
            f"--dp {args.dp} times --tp {args.tp} is {args.dp * args.tp}, but there are "
            f"{world_size} ranks: start that many (torchrun --nproc-per-node {args.dp * args.tp})"
        )
    if args.batch_size % args.dp:
        parser.error(f"--batch-size {args.batch_size} is not a multiple of --dp {args.dp}")
    heads = MODELS[args.model].n_kv_heads
    if heads % args.tp:
        parser.error(
            f"--tp {args.tp} does not divide the {heads} key/value heads of --model {args.model}"
        )
    if args.sequence_parallel is None:
        args.sequence_parallel = args.tp > 1
    if args.sequence_parallel and args.tp == 1:
        parser.error("--sequence-parallel needs --tp above 1")


def _check_out(parser: argparse.ArgumentParser, out: Path) -> None:
    """Refuses a folder that cannot be made because a file is in its place, or on its way."""
    nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not nearest.is_dir():
        parser.error(f"--out {out}: {nearest} is a file; name a folder")
