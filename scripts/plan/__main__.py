"""Communication and memory of a training step on thousands of ranks, before it is run.

    python -m scripts.plan --model 405b --mesh dp=2048,tp=8 --recipe tensorwise
    python -m scripts.plan --model deepseek_v3 --mesh dp=8,ep=8,tp=8 --recipe rowwise_folded

    python -m scripts.plan --model package.module:function --mesh dp=64 --seq-len 4096

One process plays rank 0 of a fake world. It builds the real model with fake tensors (TP + SP over
tp, FSDP2 over dp, AdamW; experts divided over ep and tp, with equal numbers of tokens) and runs one
step of it, in the state that the model has from the second step on. All counts and sizes are
measured in this run. For comparison, bf16 runs in the same way, and, for models without experts,
torchao where it is installed (tensorwise, its own styles and precompute).

    python -m scripts.plan --gradient-transport float8 --reduce-transport float8

plans each recipe a second time, with sums over ranks sent in float8, and --weight-format mxfp4
likewise with 4-bit weights. A model of your own takes tokens [b, s] and returns logits
[b, s, v], as transformers models do; FSDP2 shards the modules of its outermost ModuleLists.

    python -m scripts.plan --model package.module:function --mesh dp=32,tp=2
        --seq-len 4096 --tp-plan package.module:plan_of --layers 4

plans 4 of its blocks. With tp a transformers model has the tensor-parallel plan that it declares;
another model has the one that the function of --tp-plan makes from the converted model (and from
reduce_transport=..., with --reduce-transport), such as fp8_dist.tensor_parallel:llama_tp_plan. bf16
and the recipes have the same plan.

    python -m scripts.plan --model 8b --mesh dp=16 --gpus-per-node 8

also says what each GPU sends within its node and between nodes, by the formulas of
docs/communication.md, and how long this takes at two bandwidths, without latency: collectives
follow one another, and each takes the longer of its two times.
"""

import argparse
import dataclasses
import math
from functools import partial
from importlib import import_module
from typing import get_args

from fp8_dist.recipe_names import ExpertsRecipe
from fp8_dist.text import progress
from scripts.common.options import mesh_text, mesh_type, positive
from scripts.common.recipes import PACKED, RECIPES
from scripts.common.report import make_parser, parse, run
from scripts.common.sizes import MODELS

MOST_RANKS = 16_384


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The options; errors end the process with status 2."""
    parser = make_parser("scripts.plan", __doc__)
    add = parser.add_argument
    named = f"MODULE:FUNCTION or one of {', '.join(MODELS)}"
    text = f"{named}; the function takes no arguments and returns a model; default: %(default)s"
    add("--model", default="405b", metavar="MODEL", help=text)
    axes = partial(mesh_type, axes=("dp", "ep", "tp"))
    text = f"up to {MOST_RANKS:,} ranks; default: dp=2048,tp=8, and dp=8 for a function's model"
    add("--mesh", type=axes, help=text)
    add("--layers", type=positive, help="blocks of the model; default: all")
    text = "makes the tensor-parallel plan of a function's model, from the converted model"
    add("--tp-plan", default="", metavar="MODULE:FUNCTION", help=text)
    text = (
        "layers of a function's model that stay in bf16: the names for skip_head(model, NAME, ...)"
    )
    add("--skip", nargs="+", default=[], metavar="NAME", help=text)
    add("--recipe", nargs="+", choices=RECIPES, default=["tensorwise"], metavar="NAME")
    add("--batch-size", type=positive, default=1, help="sequences per data-parallel rank")
    add("--seq-len", type=positive, help="tokens of each; default: the longest of the model")
    add("--gpus-per-node", type=positive, metavar="G", help="rank r is on node r // G")
    text = "GB/s that a GPU sends; default: %(default)s,"
    add("--gbps-within", type=float, default=450.0, metavar="X", help=f"{text} NVLink of an H100")
    add("--gbps-between", type=float, default=50.0, metavar="X", help=f"{text} a card of 400 Gb/s")
    ways, too = ["float8", "bf16"], "plan each recipe also with"
    add("--weight-format", choices=["mxfp4"], help=f"{too} weights in this")
    text = f"{too} FSDP2's gradients in these"
    add("--gradient-transport", nargs="+", choices=[*ways, "fp32"], metavar="NAME", help=text)
    add("--reduce-transport", choices=ways, help=f"{too} tensor parallelism's sums in this")
    args = parse(parser, argv)
    args.mesh = args.mesh or axes("dp=8" if ":" in args.model else "dp=2048,tp=8")
    packed = [f"{name}+{args.weight_format}" for name in args.recipe if args.weight_format]
    if not {*packed} <= {*PACKED}:
        parser.error(f"--weight-format {args.weight_format} is for --recipe mxfp8 or blockwise")
    if args.gradient_transport and args.mesh["dp"] == 1:
        parser.error("--gradient-transport needs a dp of 2 or more")
    if not all(0 < speed < math.inf for speed in (args.gbps_within, args.gbps_between)):
        parser.error("--gbps-within and --gbps-between must be above 0")
    if math.prod(args.mesh.values()) > MOST_RANKS:
        parser.error(f"--mesh {mesh_text(args.mesh)}: more than {MOST_RANKS:,} ranks")
    if args.model not in MODELS and ":" not in args.model:
        parser.error(f"--model {args.model}: it is not {named}")
    (_check_reference if args.model in MODELS else _check_own)(parser, args)
    args.recipe += packed
    if args.mesh["ep"] == 1:
        del args.mesh["ep"]
    if args.longest is not None and args.seq_len > args.longest:
        most = f"the model's max_seq_len={args.longest}"
        parser.error(f"--seq-len {args.seq_len} is above {most}")
    return args


def _check_reference(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check the options for a named size of the reference Llama, and add its sizes to them."""
    model, tp, ep = MODELS[args.model], args.mesh["tp"], args.mesh["ep"]
    if args.tp_plan:
        parser.error(f"--tp-plan is for a function's model: {args.model} has a plan")
    if args.skip:
        parser.error("--skip is for a function's model")
    if model.mixture is None and ep > 1:
        parser.error(f"ep={ep} needs a --model with experts")
    if model.mixture is not None:
        if model.mixture.experts % (ep * tp):
            parser.error(f"ep x tp = {ep * tp} does not divide {model.mixture.experts} experts")
        if unknown := [name for name in args.recipe if name not in get_args(ExpertsRecipe)]:
            parser.error(f"--recipe {' '.join(unknown)} is not for experts")
        if args.gradient_transport:
            parser.error("--gradient-transport is not for experts, which have axes of their own")
    if model.n_kv_heads % tp:
        parser.error(f"tp={tp} does not divide the {model.n_kv_heads} key/value heads of the model")
    args.sizes = dataclasses.replace(model, n_layers=args.layers or model.n_layers)
    args.longest, args.has_peer = model.max_seq_len, model.mixture is None
    args.seq_len = args.seq_len or model.max_seq_len


def _check_own(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check the options for a model MODULE:FUNCTION, which must be convertible in each recipe."""
    if args.mesh["ep"] > 1:
        parser.error(f"ep is for {', '.join(MODELS)}")
    tp = args.mesh["tp"]
    if args.tp_plan and tp == 1:
        parser.error("--tp-plan needs a tp of 2 or more in --mesh")
    own_model = import_module("scripts.plan.own_model")
    args.sizes = own_model.OwnModel(args.model, args.layers, args.tp_plan, tuple(args.skip))
    progress(f"building and converting {args.model}")
    try:
        args.longest = own_model.longest(own_model.make(args.sizes))
        for name in args.recipe:
            own_model.converted(name, args.sizes, tp, args.reduce_transport)
    except (ValueError, NotImplementedError) as error:
        parser.error(str(error))
    args.has_peer = tp == 1
    args.seq_len = args.seq_len or args.longest
    if args.seq_len is None:
        parser.error(f"--model {args.model} does not say how many tokens it takes: give --seq-len")


def main(argv: list[str] | None = None) -> int:
    return run("scripts.plan.run", parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
