"""Times precompute_float8_dynamic_scale beside torchao's, in one run.

    python -m scripts.bench.precompute --assert 4

Each of `--ranks` ranks, which this script starts on this machine, holds its shards of `--layers`
linear layers of `--size` x `--size` under FSDP2 with float8 gathers.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8_dist import precompute_float8_dynamic_scale
from scripts.bench import timing
from scripts.common.candidates import TORCHAO
from scripts.common.models import after_step, convert
from scripts.common.options import positive
from scripts.common.ranks import run_on_ranks
from scripts.common.report import start


def precomputing(name: str, args: argparse.Namespace) -> Callable[[], None]:
    """Precompute of a candidate's model: linear layers under FSDP2, one group each."""
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
    """Median seconds until the scales are known, by candidate; called on every rank."""
    names = ("tensorwise", *TORCHAO[:1])
    timed = {name: timing.Timed(precomputing(name, args)) for name in names}
    return timing.medians(timed, args, description="precompute")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = timing.make_parser("scripts.bench.precompute", __doc__, repeat=15)
    add = parser.add_argument
    add("--layers", type=positive, default=100, help="default: %(default)s")
    add("--size", type=positive, default=512, help="default: %(default)s")
    add("--ranks", type=positive, default=2, help="default: %(default)s")
    args = start(parser, argv)
    options = {"device": args.device, "threads": args.threads}
    seconds = run_on_ranks(args.ranks, measure, args, **options)[0]
    return timing.finish(args, {"precompute": seconds})


if __name__ == "__main__":
    sys.exit(main())
