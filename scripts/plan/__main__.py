"""What a training step costs in communication and memory on thousands of ranks, before it is run.

    python -m scripts.plan --model 405b --mesh dp=2048,tp=8 --recipe tensorwise

Builds the real model under the library (TP + SP over tp, FSDP2 over dp, AdamW) in one process that
plays rank 0 of a fake world with fake tensors, and runs one real step of it, as it is from the
second one on. All counts and sizes are those of this run. bf16 and, where it is installed, torchao
(tensorwise, its own styles and precompute) run in the same way beside it.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import fields
from pathlib import Path

from scripts.common.blocks import DOCS, replace_block
from scripts.common.candidates import BF16, RECIPES, TORCHAO
from scripts.common.llama import MODELS, LlamaConfig
from scripts.common.options import command_parser, positive
from scripts.plan.links import Links
from scripts.plan.run import run_all
from scripts.plan.step import PEER, Plan, Step
from scripts.plan.tables import (
    collectives_table,
    cost_table,
    growth_table,
    memory_table,
    time_table,
)

PAGE = DOCS / "plan.md"
MOST_RANKS = 16_384
WORLDS = (8, 64, 1024, 4096, 16_384)  # of --scale
# The ranks of the last axis are consecutive.
MESHES = (("dp", "tp"), ("replicate", "shard", "tp"))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options, with `config`, `axes` and `links`; errors end the process with status 2."""
    parser = command_parser("scripts.plan", __doc__)
    add = parser.add_argument
    models = f"{'|'.join(MODELS)}|FILE"
    add("--model", default="405b", metavar=models, help="FILE: JSON with LlamaConfig's fields")
    meshes = f"dp=..,tp=.., or replicate=..,shard=..,tp=.. (HSDP); up to {MOST_RANKS:,} ranks"
    add("--mesh", default="dp=2048,tp=8", help=meshes)
    add("--recipe", nargs="+", choices=RECIPES, default=["tensorwise"], metavar="NAME")
    add("--batch-size", type=positive, default=1, help="sequences per data-parallel rank")
    add("--seq-len", type=positive, help="tokens of each; default: the longest of the model")
    for field in fields(Links):
        name = f"--{field.name.replace('_', '-')}"
        add(name, type=type(field.default), default=field.default, help="of the assumed links")
    add("--scale", action="store_true", help=f"plan the first recipe at {WORLDS} ranks too")
    add("--write", action="store_true", help="replace the tables of docs/plan.md (with --scale)")
    add("--jobs", type=positive, default=min(os.cpu_count() or 1, 4), help="runs at a time")
    args = parser.parse_args(argv)
    try:
        args.config = read_model(args.model)
        args.axes = read_mesh(args.mesh)
        args.links = Links(**{field.name: getattr(args, field.name) for field in fields(Links)})
    except ValueError as error:
        parser.error(str(error))
    if args.config.n_kv_heads % args.axes["tp"]:
        heads = f"the {args.config.n_kv_heads} key/value heads of the model"
        parser.error(f"tp={args.axes['tp']} does not divide {heads}")
    args.seq_len = args.seq_len or args.config.max_seq_len
    if args.seq_len > args.config.max_seq_len:
        most = f"the model's max_seq_len={args.config.max_seq_len}"
        parser.error(f"--seq-len {args.seq_len} is above {most}")
    if args.write and not args.scale:
        parser.error("--write needs --scale: the growth table is part of the page")
    if args.scale and "dp" not in args.axes:
        parser.error("--scale changes dp: give a --mesh dp=..,tp=..")
    return args


def read_model(model: str) -> LlamaConfig:
    """The sizes of a model by name, or from a JSON file.

    Raises:
        ValueError: there is no such file, or it does not hold the fields of `LlamaConfig`.
    """
    if model in MODELS:
        return MODELS[model]
    try:
        sizes = json.loads(Path(model).read_text())
        wrong = [n for n, v in sizes.items() if isinstance(v, bool | str | None) or not v > 0]
        if wrong:
            raise ValueError(f"{wrong[0]} must be a positive number, got {sizes[wrong[0]]!r}")
        return LlamaConfig(**sizes)
    except FileNotFoundError:
        raise ValueError(
            f"--model {model}: no such file, and none of {', '.join(MODELS)}"
        ) from None
    except (AttributeError, TypeError, ValueError) as error:
        fields_needed = "a JSON object with the fields of LlamaConfig is needed"
        raise ValueError(f"--model {model}: {fields_needed}: {error}") from error


def read_mesh(mesh: str) -> dict[str, int]:
    """The sizes of a mesh's axes, in their order; those left out are 1.

    Raises:
        ValueError: the text is no list of NAME=SIZE, an axis is unknown, or there are too many
            ranks.
    """
    sizes: dict[str, int] = {}
    for part in mesh.split(","):
        name, equals, size = part.strip().partition("=")
        if not (equals and size.isdecimal() and size.isascii() and int(size)):
            raise ValueError(f"--mesh {mesh}: {part.strip()!r} is not NAME=SIZE; use dp=..,tp=..")
        if name in sizes:
            raise ValueError(f"--mesh {mesh}: {name} is there twice")
        sizes[name] = int(size)
    known = next((names for names in MESHES if set(sizes) <= set(names)), None)
    if known is None:
        shown = " or ".join(",".join(f"{name}=.." for name in names) for names in MESHES)
        raise ValueError(f"--mesh {mesh}: use {shown}")
    if math.prod(sizes.values()) > MOST_RANKS:
        ranks = math.prod(sizes.values())
        raise ValueError(f"--mesh {mesh}: {ranks:,} ranks, more than {MOST_RANKS:,}")
    return {name: sizes.get(name, 1) for name in known}


def plans_of(args: argparse.Namespace) -> list[Plan]:
    """The recipes, bf16 and torchao on the chosen mesh; the first of them on --scale's."""
    others = [BF16, *([PEER] if PEER in TORCHAO else [])]
    chosen = [(args.axes, variant) for variant in (*args.recipe, *others)]
    if args.scale:
        tp = args.axes["tp"]
        grown = [{"dp": ranks // tp, "tp": tp} for ranks in WORLDS if ranks % tp == 0]
        chosen += [(axes, variant) for axes in grown for variant in (args.recipe[0], *others)]
    plans: list[Plan] = []
    for axes, variant in chosen:
        plan = Plan(args.config, axes, variant, args.batch_size, args.seq_len)
        if plan not in plans:
            plans.append(plan)
    return plans


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(argv)
    plans = plans_of(args)
    found = list(zip(plans, run_all(plans, args.jobs), strict=True))
    runs = [(plan, step) for plan, step in found if isinstance(step, Step)]
    here = [(plan, step) for plan, step in runs if plan.axes == args.axes]
    first, step = here[0]
    mesh = " x ".join(f"{name} {size:,}" for name, size in args.axes.items())
    blocks = {
        "model": f"{args.model}: {step.parameters:,} parameters, {step.weights} converted weights, "
        f"{args.config.n_layers} blocks; {first.ranks:,} ranks ({mesh}); {args.batch_size} x "
        f"{args.seq_len:,} tokens on each data-parallel rank.",
        "collectives": collectives_table(here),
        "memory": memory_table(here),
        "time": time_table(here, args.links),
    }
    if args.scale:
        runs.sort(key=lambda run: run[0].ranks)
        blocks["growth"] = growth_table(runs, args.links)
    blocks["cost"] = cost_table(runs)
    for name, text in blocks.items():
        print(f"{text}\n")
        if args.write:
            replace_block(PAGE, name, text)
    for reason in (step for _, step in found if isinstance(step, str)):
        print(reason, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
