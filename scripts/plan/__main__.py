"""What a training step communicates and holds in memory on thousands of ranks, before it is run.

    python -m scripts.plan --model 405b --mesh dp=2048,tp=8 --recipe tensorwise

Builds the real model under the library (TP + SP over tp, FSDP2 over dp, AdamW) in one process that
plays rank 0 of a fake world with fake tensors, and runs one real step of it, as it is from the
second one on. All counts and sizes are those of this run. bf16 and, where it is installed, torchao
(tensorwise, its own styles and precompute) run in the same way beside it.

    python -m scripts.plan --gradient-transport bf16 float8 --nodes 256 --reduce-transport float8

compares ways of FSDP2's gradients on the wire for the first recipe, and no others.
"""

import argparse
import dataclasses
import math
import sys
from typing import get_args

from fp8_dist.fsdp.gradient_transport import Transport
from scripts.common.candidates import BF16, RECIPES, TORCHAO
from scripts.common.llama import MODELS
from scripts.common.options import mesh_text, mesh_type, positive
from scripts.common.report import finish, make_parser, start
from scripts.plan.run import run_all
from scripts.plan.step import PEER, Gradients, Plan, Step
from scripts.plan.tables import (
    collectives_table,
    differences_table,
    growth_table,
    memory_table,
)

MOST_RANKS = 16_384
WORLDS = (8, 64, 1024, 4096, 16_384)  # of --scale


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; errors end the process with status 2."""
    parser = make_parser("scripts.plan", __doc__)
    add = parser.add_argument
    add("--model", choices=MODELS, default="405b", help="default: %(default)s")
    add("--mesh", type=mesh_type, default="dp=2048,tp=8", help=f"up to {MOST_RANKS:,} ranks")
    add("--layers", type=positive, help="blocks of the model; default: all")
    add("--recipe", nargs="+", choices=RECIPES, default=["tensorwise"], metavar="NAME")
    add("--batch-size", type=positive, default=1, help="sequences per data-parallel rank")
    add("--seq-len", type=positive, help="tokens of each; default: the longest of the model")
    add("--scale", action="store_true", help=f"plan the first recipe at {WORLDS} ranks too")
    ways, wire = get_args(Transport), "plan the first recipe with its gradients in these, too"
    add("--gradient-transport", nargs="+", choices=ways, default=[], metavar="NAME", help=wire)
    nodes = "with --gradient-transport: the last of them in two stages, too, over so many nodes"
    add("--nodes", type=positive, help=nodes)
    errors = "with --gradient-transport: the last of them with error feedback, too"
    add("--error-feedback", action="store_true", help=errors)
    sums = "with --gradient-transport: the last of them with tensor parallelism's sums in this, too"
    add("--reduce-transport", choices=ways, help=sums)
    args = start(parser, argv)
    _check_gradients(parser, args)
    model, tp = MODELS[args.model], args.mesh["tp"]
    args.sizes = dataclasses.replace(model, n_layers=args.layers or model.n_layers)
    args.seq_len = args.seq_len or model.max_seq_len
    if math.prod(args.mesh.values()) > MOST_RANKS:
        parser.error(f"--mesh {mesh_text(args.mesh)}: more than {MOST_RANKS:,} ranks")
    if model.n_kv_heads % tp:
        parser.error(f"tp={tp} does not divide the {model.n_kv_heads} key/value heads of the model")
    if args.seq_len > model.max_seq_len:
        most = f"the model's max_seq_len={model.max_seq_len}"
        parser.error(f"--seq-len {args.seq_len} is above {most}")
    return args


def _check_gradients(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    dp, nodes = args.mesh["dp"], args.nodes
    if not args.gradient_transport:
        for name in ("nodes", "error_feedback", "reduce_transport"):
            if getattr(args, name):
                parser.error(f"--{name.replace('_', '-')} needs --gradient-transport")
        return
    if args.scale:
        parser.error("--scale plans other worlds, --gradient-transport other gradients: not both")
    if dp == 1:
        parser.error("--gradient-transport needs a --mesh with dp: nothing else reduces gradients")
    if args.reduce_transport and (args.mesh["tp"] == 1 or args.recipe[0] == BF16):
        parser.error("--reduce-transport is for tensor parallelism of converted layers")
    if nodes and (nodes == 1 or dp % nodes):
        parser.error(f"--nodes {nodes} must be 2 or more, and divide dp={dp}")


def gradients_of(args: argparse.Namespace) -> list[Gradients | None]:
    """The ways of gradients that `--gradient-transport` compares."""
    ways: list[Gradients | None] = [None, *map(Gradients, args.gradient_transport)]
    last = args.gradient_transport[-1]
    if args.nodes:
        ways.append(Gradients(last, nodes=args.nodes))
    if args.error_feedback:
        ways.append(Gradients(last, error_feedback=True))
    if args.reduce_transport:
        ways.append(Gradients(last, reduce_transport=args.reduce_transport))
    return ways


def plans_of(args: argparse.Namespace) -> list[Plan]:
    """The recipes, bf16 and torchao on the chosen mesh; the first of them on --scale's.

    With --gradient-transport: the first recipe alone, in all its ways.
    """
    if args.gradient_transport:
        sizes = (args.sizes, args.mesh, args.recipe[0], args.batch_size, args.seq_len)
        return [Plan(*sizes, gradients) for gradients in gradients_of(args)]
    others = [BF16, *([PEER] if PEER in TORCHAO else [])]
    chosen = [(args.mesh, variant) for variant in (*args.recipe, *others)]
    if args.scale:
        tp = args.mesh["tp"]
        grown = [{"dp": ranks // tp, "tp": tp} for ranks in WORLDS if ranks % tp == 0]
        chosen += [(axes, variant) for axes in grown for variant in (args.recipe[0], *others)]
    plans: list[Plan] = []
    for axes, variant in chosen:
        plan = Plan(args.sizes, axes, variant, args.batch_size, args.seq_len)
        if plan not in plans:
            plans.append(plan)
    return plans


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(argv)
    plans = plans_of(args)
    found = list(zip(plans, run_all(plans), strict=True))
    for _, reason in found:
        if isinstance(reason, str):
            print(reason, file=sys.stderr)
    runs = [(plan, step) for plan, step in found if isinstance(step, Step)]
    here = [(plan, step) for plan, step in runs if plan.axes == args.mesh]
    first, step = here[0]
    if args.gradient_transport:
        return finish(args, {"gradients": differences_table(here)})
    mesh = " x ".join(f"{name} {size:,}" for name, size in args.mesh.items())
    blocks = {
        "model": f"{args.model}: {step.parameters:,} parameters, {step.weights} converted weights, "
        f"{first.model.n_layers} blocks; {first.ranks:,} ranks ({mesh}); {args.batch_size} x "
        f"{args.seq_len:,} tokens on each data-parallel rank.",
        "collectives": collectives_table(here),
        "memory": memory_table(here),
    }
    if args.scale:
        runs.sort(key=lambda run: run[0].ranks)
        blocks["growth"] = growth_table(runs)
    return finish(args, blocks)


if __name__ == "__main__":
    sys.exit(main())
