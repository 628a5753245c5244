"""The models of `scripts.bench.precompute`, and the timing of their precompute."""

import argparse
from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8_dist import precompute_float8_dynamic_scale
from scripts.bench import timing
from scripts.common.candidates import TORCHAO
from scripts.common.models import after_step, convert
from scripts.common.ranks import run_on_ranks


def precomputing(name: str, args: argparse.Namespace) -> Callable[[], None]:
    """Shard a candidate's model, each linear layer by itself, and return its precompute."""
    layers = (nn.Linear(args.size, args.size, bias=False) for _ in range(args.layers))
    model = nn.Sequential(*layers).to(args.device)
    convert(name, model, shard=True)
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    if name in TORCHAO:
        return partial(after_step(name, sharded=True), model)
    return partial(precompute_float8_dynamic_scale, model)


def measure(args: argparse.Namespace) -> dict[str, float]:
    """The median seconds of precompute by candidate; called on every rank."""
    names = ("tensorwise", *TORCHAO[:1])
    timed = {name: timing.Timed(precomputing(name, args)) for name in names}
    return timing.medians(timed, args, description="precompute")


def run(args: argparse.Namespace) -> int:
    options = {"device": args.device, "threads": args.threads}
    seconds = run_on_ranks(args.ranks, measure, args, **options)[0]
    return timing.finish(args, {"precompute": seconds})
