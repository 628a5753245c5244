"""The options of a training run, and all checks of them."""

import argparse
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from fp8_dist.recipe_names import ExpertsRecipe
from scripts.common.corpus import load_corpus
from scripts.common.options import command_parser, positive
from scripts.common.recipes import BF16, PACKED, RECIPES
from scripts.common.sizes import MODELS

CHECKPOINTS = "checkpoints"  # the folder in --out


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of a training run."""
    parser = command_parser(module, description)
    add = parser.add_argument
    add("--model", choices=MODELS, default="debug", help="size of the Llama; moe: with experts")
    add("--recipe", choices=RECIPES, default=BF16, help="bf16, or a float8 recipe")
    add("--weight-format", choices=["mxfp4"], help="of mxfp8's and blockwise's; default: e4m3")
    dtype = "of what is not in float8: of gathered weights, activations and their gradients"
    add("--compute", choices=["bf16", "fp32"], default="bf16", help=f"dtype {dtype}")
    add("--dp", type=positive, help="data-parallel (FSDP2) ranks; default: all that others leave")
    add("--tp", type=positive, default=1, help="tensor-parallel ranks, with sequence parallelism")
    add("--ep", type=positive, default=1, help="data-parallel ranks that divide experts")
    add("--compile", action="store_true", help="torch.compile each transformer block")
    wire = "how FSDP2's gradients travel; default: in fp32, by its own reduce-scatter"
    add("--gradient-transport", choices=["float8", "bf16", "fp32"], help=wire)
    nodes = "ranks of each node, also if it is the only one; default: as launched"
    add("--gpus-per-node", type=positive, metavar="N", help=f"{nodes}, for --gradient-transport")
    add("--within-nodes", choices=["float8", "bf16"], help="how they travel within a node")
    sums = "how sums of tensor parallelism's reduce-scatters travel; default: in bf16, by torch's"
    add("--reduce-transport", choices=["float8", "bf16"], help=sums)
    add("--steps", type=positive, default=120)
    add("--batch-size", type=positive, default=16, help="rows of the global batch, over all ranks")
    parts = "divide the batch into so many parts, summed in an order that does not depend on --dp"
    add("--micro-batches", type=positive, metavar="N", help=parts)
    add("--seq-len", type=positive, default=128, help="tokens (bytes) per row")
    add("--lr", type=float, default=1e-3, help="peak; falls linearly to 0 after the warmup")
    add("--warmup", type=int, default=40, help="steps in which --lr is reached linearly")
    add("--seed", type=int, default=0, help="of weights and data")
    add("--out", type=Path, help="folder of metrics and tables; default: runs/RECIPE")
    stats = "record what float8 casts do to the numbers of every so many steps, in --out"
    add("--stats-every", type=positive, metavar="STEPS", help=stats)
    kept = "write the last steps' casts into --out if something goes wrong, with tensors of LAYERS"
    add("--record", nargs="*", metavar="LAYERS", help=kept)
    many = "write a checkpoint into --out every so many steps, and after the last one"
    add("--checkpoint-every", type=positive, metavar="STEPS", help=many)
    newest = "continue from the newest checkpoint of --out, if there is one"
    add("--resume", choices=["auto"], help=newest)
    add("--data", type=Path, help="file or folder; default: Python's standard library source")
    return parser


def parse_options(
    parser: argparse.ArgumentParser, argv: list[str] | None, world_size: int | None = None
) -> argparse.Namespace:
    """Parse and check the options.

    Errors end the process with status 2, on all ranks alike.

    Args:
        parser: a parser from `make_parser`; its defaults may have been changed.
        argv: the arguments; None: those of the process.
        world_size: the number of ranks; None: the WORLD_SIZE that torchrun sets, else 1.

    Returns:
        The options with defaults filled in, and with the text as `corpus`.
    """
    args = parser.parse_args(argv)
    if world_size is None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if args.dp is None:
        args.dp = max(world_size // (args.ep * args.tp), 1)
    named = args.recipe + (f"+{args.weight_format}" if args.weight_format else "")
    if named not in (*RECIPES, *PACKED):
        parser.error(f"--weight-format {args.weight_format} is for --recipe mxfp8 or blockwise")
    args.out = args.out or Path("runs") / named
    for problem in problems(args, world_size):
        parser.error(problem)
    args.recipe = named  # the candidate's name, which includes the weight format
    del args.weight_format
    try:
        args.corpus = load_corpus(args.data, seq_len=args.seq_len)
    except ValueError as error:
        parser.error(f"--data: {error}")
    return args


def checkpoints_in(root: Path) -> dict[int, Path]:
    """The checkpoints in a folder by step, the newest first."""
    paths = sorted(root.glob("step-*"), reverse=True)
    return {int(path.name.removeprefix("step-")): path for path in paths}


def problems(args: argparse.Namespace, world_size: int) -> Iterator[str]:
    """Yield what is wrong with the options. (Only the first is reported.)"""
    if args.warmup < 0:
        yield f"--warmup must not be negative, got {args.warmup}"
    if not (args.lr > 0 and math.isfinite(args.lr)):
        yield f"--lr must be positive and finite, got {args.lr}"
    if not 0 <= args.seed < 2**31:
        yield f"--seed must lie in [0, 2**31), got {args.seed}"
    model, dp = MODELS[args.model], f"--dp {args.dp}"
    if args.ep > 1:
        dp += f" times --ep {args.ep}"
    if (ranks := args.dp * args.ep * args.tp) != world_size:
        yield (
            f"{dp} times --tp {args.tp} is {ranks}, but there are {world_size} ranks: start that "
            f"many (torchrun --nproc-per-node {ranks})"
        )
    if args.micro_batches is None and args.batch_size % (args.dp * args.ep):
        yield f"--batch-size {args.batch_size} is not a multiple of {dp}"
    if model.n_kv_heads % args.tp:
        heads = f"the {model.n_kv_heads} key/value heads of --model {args.model}"
        yield f"--tp {args.tp} does not divide {heads}"
    if model.mixture is not None:
        yield from problems_of_experts(args, model.mixture.experts)
    elif args.ep > 1:
        yield f"--ep {args.ep} needs a --model with experts"
    if args.micro_batches is not None and args.batch_size % args.micro_batches:
        yield f"--batch-size {args.batch_size} is not a multiple of --micro-batches"
    if args.micro_batches is not None and args.gradient_transport is None and args.dp > 1:
        yield "--micro-batches needs a --gradient-transport where --dp is 2 or more"
    if args.gradient_transport is None and (args.gpus_per_node, args.within_nodes) != (None, None):
        yield "--gpus-per-node and --within-nodes need a --gradient-transport"
    if args.gpus_per_node is not None and world_size % args.gpus_per_node:
        yield f"--gpus-per-node {args.gpus_per_node} does not divide the {world_size} ranks"
    if args.reduce_transport is not None and (args.tp == 1 or args.recipe == BF16):
        yield (
            "--reduce-transport needs --tp 2 or more and a float8 --recipe: it is for the "
            "reduce-scatters of float8 layers"
        )
    if args.recipe == BF16 and (args.stats_every, args.record) != (None, None):
        yield "--stats-every and --record are for float8 recipes: in bf16 nothing is cast"
    if not args.resume and checkpoints_in(args.out / CHECKPOINTS):
        # The files of two runs would mix.
        yield (
            "--out has checkpoints of an earlier run: continue it with --resume auto, or choose "
            "another --out"
        )


def problems_of_experts(args: argparse.Namespace, experts: int) -> Iterator[str]:
    """Yield the options that a mixture of this many experts does not support."""
    if args.recipe not in (known := (BF16, *get_args(ExpertsRecipe))):
        yield f"--recipe {args.recipe} is not for experts: use one of {', '.join(known)}"
    if experts % (args.ep * args.tp):
        yield f"--ep {args.ep} times --tp {args.tp} does not divide the {experts} experts"
    if args.seq_len % args.tp:
        yield f"--tp {args.tp} does not divide the --seq-len {args.seq_len}"
    if args.compile:
        yield "--compile is not for --model moe: FSDP2's hooks break its graphs"
    if args.gradient_transport is not None or args.micro_batches is not None:
        yield (
            "--gradient-transport is not for --model moe: experts have axes of their own. Nor is "
            "--micro-batches"
        )
