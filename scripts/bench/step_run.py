"""The training steps of `scripts.bench.step`."""

import argparse
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fp8_dist.debug import Float8Stats, float8_stats, record
from scripts.bench import timing
from scripts.bench.timing import Timed
from scripts.common.llama import MODELS, Llama, LlamaConfig
from scripts.common.models import after_step, build
from scripts.common.options import mesh_text
from scripts.common.ranks import run_on_ranks
from scripts.common.recipes import OURS

Mesh = dict[str, int]  # sizes of dp and tp
Batch = tuple[torch.Tensor, torch.Tensor]
# The dtype of attention by type of device, if not bf16. On CPUs, with heads and sequences as short
# as here, torch's backward of bf16 attention would take most of a step.
ATTENTION = {"cpu": torch.float32}


def parts_of_step(
    name: str, model: Llama, batch: Batch, sharded: bool
) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:
    """Two functions: forward and backward, returning the loss; optimizer step and scale update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    after = after_step(name, sharded)
    tokens, targets = batch

    def step() -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()
        after(model)

    return step, update


def step_of(
    name: str, sizes: LlamaConfig, mesh: DeviceMesh | None, args: argparse.Namespace, batch: Batch
) -> tuple[Llama, Callable[[], None]]:
    """A candidate's model and training step."""
    model = build(name, sizes, mesh, args.device, compiled=args.compile)
    for block in model.layers:
        block.attention.dtype = ATTENTION.get(args.device)
    sharded = mesh is not None and mesh["dp"].size() > 1
    step, update = parts_of_step(name, model, batch, sharded)

    def run() -> None:
        step()
        update()

    return model, run


def with_statistics(
    model: Llama, step: Callable[[], None], mesh: DeviceMesh | None
) -> dict[str, Timed]:
    """The step under each kind of statistics, by name."""
    each = float8_stats(model, every=2)
    recorder = record(model, tempfile.mkdtemp())

    def recorded(stats: Float8Stats, number: int) -> None:
        with stats.at(number):
            step()
        stats.rows.clear()

    ways = {
        "entered": Timed(partial(recorded, each, 1)),
        "recorded": Timed(partial(recorded, each, 0)),
        "watched": Timed(step, recorder.start, recorder.stop),  # as in a block of many steps
    }
    if mesh is None:
        ways["with GEMMs"] = Timed(partial(recorded, float8_stats(model, gemms=True), 0))
    return ways


def measure(args: argparse.Namespace, axes: Mesh) -> dict[str, dict[str, float]]:
    """The median seconds of a step by model and candidate; called on every rank."""
    mesh = None
    if dist.is_initialized():
        mesh = init_device_mesh(args.device, (*axes.values(),), mesh_dim_names=(*axes,))
    generator = torch.Generator().manual_seed(0 if mesh is None else mesh.get_local_rank("dp"))
    tokens = torch.randint(256, (2, args.batch_size, args.seq_len), generator=generator)
    inputs, targets = tokens.to(args.device)
    by_model = {}
    for model in args.model:
        sizes = MODELS[model]
        if args.layers is not None:
            sizes = replace(sizes, n_layers=args.layers, vocab_size=256)
        timed = {}
        for name in args.candidates or timing.CANDIDATES:
            llama, step = step_of(name, sizes, mesh, args, (inputs, targets))
            timed[name] = Timed(step)
            if args.stats is not None and name in OURS:
                ways = with_statistics(llama, step, mesh)
                kinds = [kind for kind in ways if kind in (args.stats or ways)]
                timed |= {f"{name}, {kind}": ways[kind] for kind in kinds}
        by_model[model] = timing.medians(timed, args, warm_up=3, description=model)
    return by_model


def run(args: argparse.Namespace) -> int:
    by_title = {}
    for mesh in args.mesh:
        ranks, task = math.prod(mesh.values()), partial(measure, args, mesh)
        options = {"device": args.device, "threads": args.threads}
        by_model = task() if ranks == 1 else run_on_ranks(ranks, task, **options)[0]
        layers = "" if args.layers is None else f" x {args.layers}"
        for model, seconds in by_model.items():
            title = f"step {model}{layers} {mesh_text(mesh)}{' compiled' * args.compile}"
            by_title[title] = seconds
    return timing.finish(args, by_title)
