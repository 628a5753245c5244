"""Times a training step of the reference model beside bf16 and torchao, in one run.

    python -m scripts.bench.step --mesh dp=2 tp=2 dp=2,tp=2 --model debug small --assert 2
    python -m scripts.bench.step --compile --assert 1

A step is what follows the optimizer's step before (precompute, or the sync of delayed scales),
forward, backward and an AdamW step (fused). `--mesh` names FSDP2 ("dp") and tensor-parallel ("tp",
with sequence parallelism) axes, whose ranks this script starts on this machine, bound to cores;
"none" is one process. `--compile` compiles each transformer block. `--assert RATIO`: tensorwise has
RATIO times torchao's speed. The first command above takes 20 minutes on two cores.

The smaller the batch, the more of a step is Python and the latency of collectives.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scripts.bench import timing
from scripts.common.candidates import BF16, OURS, TORCHAO, peer_of
from scripts.common.llama import MODELS, Llama, LlamaConfig
from scripts.common.markdown import table
from scripts.common.models import after_step, build
from scripts.common.options import mesh_text, mesh_type, positive
from scripts.common.ranks import run_on_ranks
from scripts.common.report import finish, make_parser, start

Mesh = dict[str, int]  # sizes of dp and tp
Batch = tuple[torch.Tensor, torch.Tensor]
NAMES = (BF16, *OURS, *TORCHAO)
# What attention multiplies in on each type of device, if not in bf16: on CPUs, at heads and
# sequences this short, torch's backward of it in bf16 would be most of a step.
ATTENTION = {"cpu": torch.float32}


def step_parser(module: str, description: str | None, repeat: int) -> argparse.ArgumentParser:
    """A parser with the options of training steps."""
    parser = make_parser(module, description, repeat=repeat)
    add = parser.add_argument
    add("--model", choices=MODELS, nargs="+", default=["debug"], help="default: debug")
    add("--layers", type=positive, help="so many of its layers, with 256 tokens to predict")
    add("--mesh", type=mesh_type, nargs="+", default=[mesh_type("none")], help="default: none")
    add("--batch-size", type=positive, default=64, help="rows per rank of dp; %(default)s")
    add("--seq-len", type=positive, default=128, help="tokens per row; %(default)s")
    add("--compile", action="store_true", help="torch.compile each block")
    return parser


def prepare(axes: Mesh, args: argparse.Namespace) -> tuple[DeviceMesh | None, Batch]:
    """The mesh of the ranks, if there are any, and this rank's batch."""
    mesh = None
    if dist.is_initialized():
        mesh = init_device_mesh(args.device, (*axes.values(),), mesh_dim_names=(*axes,))
    generator = torch.Generator().manual_seed(0 if mesh is None else mesh.get_local_rank("dp"))
    tokens = torch.randint(256, (2, args.batch_size, args.seq_len), generator=generator)
    inputs, targets = tokens.to(args.device)
    return mesh, (inputs, targets)


def sizes_of(model: str, args: argparse.Namespace) -> LlamaConfig:
    """The sizes of a model."""
    sizes = MODELS[model]
    return sizes if args.layers is None else replace(sizes, n_layers=args.layers, vocab_size=256)


def step_of(
    name: str, sizes: LlamaConfig, mesh: DeviceMesh | None, args: argparse.Namespace, batch: Batch
) -> tuple[Llama, Callable[[], None]]:
    """A candidate's model and training step; it starts with what follows the step before."""
    model = build(name, sizes, mesh, args.device, compiled=args.compile)
    for block in model.layers:
        block.attention.dtype = ATTENTION.get(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    after = after_step(name, sharded=mesh is not None and mesh["dp"].size() > 1)
    tokens, targets = batch

    def step() -> None:
        after(model)
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def on_meshes(
    args: argparse.Namespace, measure: Callable[[Mesh], dict[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """(title, figures) of each mesh and model; `measure` has figures by model, on every rank."""
    for mesh in args.mesh:
        task = partial(measure, mesh)
        ranks, options = math.prod(mesh.values()), {"device": args.device, "threads": args.threads}
        by_model = task() if ranks == 1 else run_on_ranks(ranks, task, **options)[0]
        layers = "" if args.layers is None else f" x {args.layers}"
        for model, figures in by_model.items():
            yield f"{model}{layers} {mesh_text(mesh)}{' compiled' * args.compile}", figures


def measure(
    names: Sequence[str], args: argparse.Namespace, axes: Mesh
) -> dict[str, dict[str, float]]:
    """Median seconds of a step by model and candidate; called on every rank."""
    mesh, batch = prepare(axes, args)
    found = {}
    for model in args.model:
        sizes = sizes_of(model, args)
        timed = {name: timing.Timed(step_of(name, sizes, mesh, args, batch)[1]) for name in names}
        found[model] = timing.medians(timed, args, warm_up=3, description=model)
    return found


def step_table(seconds: dict[str, float]) -> str:
    """A row per candidate, as a multiple of bf16 and of torchao's like recipe."""
    header = ["candidate", "ms", "x bf16", "faster than torchao"]
    lines = [
        [
            name,
            timing.milliseconds(median),
            timing.ratio(median, seconds[BF16]),
            timing.ratio(seconds.get(peer_of(name) or ""), median),
        ]
        for name, median in seconds.items()
    ]
    return table(header, lines, "lr")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = step_parser("scripts.bench.step", __doc__, repeat=7)
    asserts = "fail unless tensorwise is faster than torchao's by this on each mesh"
    parser.add_argument("--assert", dest="asserted", type=float, metavar="RATIO", help=asserts)
    args = start(parser, argv)
    if args.compile and any(math.prod(mesh.values()) > 1 for mesh in args.mesh):
        parser.error("--compile is for --mesh none: torchao's layers don't compile with TP")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(argv)
    runs = dict(on_meshes(args, partial(measure, NAMES, args)))
    checks = [
        timing.check_faster(
            name, seconds["tensorwise"], seconds.get("torchao tensorwise"), args.asserted
        )
        for name, seconds in runs.items()
        if args.asserted
    ]
    return finish(args, {f"step {name}": step_table(runs[name]) for name in runs}, checks)


if __name__ == "__main__":
    sys.exit(main())
