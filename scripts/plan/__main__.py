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
from dataclasses import astuple, fields
from pathlib import Path

from scripts.common.blocks import DOCS, replace_block
from scripts.common.candidates import BF16, RECIPES, TORCHAO
from scripts.common.llama import MODELS, LlamaConfig
from scripts.common.options import command_parser, mesh_text, mesh_type, positive
from scripts.plan.links import Links
from scripts.plan.run import run_all
from scripts.plan.step import PEER, Plan, Step
from scripts.plan.tables import collectives_table, growth_table, memory_table, time_table

PAGE = DOCS / "plan.md"
MOST_RANKS = 16_384
WORLDS = (8, 64, 1024, 4096, 16_384)  # of --scale


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options, with `config` and `links`; errors end the process with status 2."""
    parser = command_parser("scripts.plan", __doc__)
    add = parser.add_argument
    models = f"{'|'.join(MODELS)}|FILE"
    add("--model", default="405b", metavar=models, help="FILE: JSON with LlamaConfig's fields")
    meshes = f"dp=..,tp=.., or replicate=..,shard=..,tp=.. (HSDP); up to {MOST_RANKS:,} ranks"
    add("--mesh", type=mesh_type, default="dp=2048,tp=8", help=meshes)
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
        args.links = Links(**{field.name: getattr(args, field.name) for field in fields(Links)})
    except ValueError as error:
        parser.error(str(error))
    config, tp = args.config, args.mesh["tp"]
    args.seq_len = args.seq_len or config.max_seq_len
    if math.prod(args.mesh.values()) > MOST_RANKS:
        parser.error(f"--mesh {mesh_text(args.mesh)}: more than {MOST_RANKS:,} ranks")
    if config.n_kv_heads % tp:
        parser.error(
            f"tp={tp} does not divide the {config.n_kv_heads} key/value heads of the model"
        )
    if args.seq_len > config.max_seq_len:
        most = f"the model's max_seq_len={config.max_seq_len}"
        parser.error(f"--seq-len {args.seq_len} is above {most}")
    if args.write and not args.scale:
        parser.error("--write needs --scale: the growth table is part of the page")
    if args.scale and "dp" not in args.mesh:
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
        config = LlamaConfig(**json.loads(Path(model).read_text()))
        if min(astuple(config)) <= 0:
            raise ValueError("all sizes must be positive")
        return config
    except FileNotFoundError:
        known = ", ".join(MODELS)
        raise ValueError(f"--model {model}: no such file, and none of {known}") from None
    except (TypeError, ValueError) as error:
        needed = "a JSON object with the fields of LlamaConfig is needed"
        raise ValueError(f"--model {model}: {needed}: {error}") from error


def plans_of(args: argparse.Namespace) -> list[Plan]:
    """The recipes, bf16 and torchao on the chosen mesh; the first of them on --scale's."""
    others = [BF16, *([PEER] if PEER in TORCHAO else [])]
    chosen = [(args.mesh, variant) for variant in (*args.recipe, *others)]
    if args.scale:
        tp = args.mesh["tp"]
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
    here = [(plan, step) for plan, step in runs if plan.axes == args.mesh]
    first, step = here[0]
    mesh = " x ".join(f"{name} {size:,}" for name, size in args.mesh.items())
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
    for name, text in blocks.items():
        print(f"{text}\n")
        if args.write:
            replace_block(PAGE, name, text)
    for reason in (step for _, step in found if isinstance(step, str)):
        print(reason, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
