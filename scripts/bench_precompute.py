"""Times precompute_float8_dynamic_scale beside torchao's, in one run.

    python scripts/bench_precompute.py --assert 4 --write

Each of `--ranks` ranks, which this script starts on this machine, holds its shards of `--layers`
linear layers of `--size` x `--size` under FSDP2 with float8 gathers.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import bench_peers
import torch
import torch.distributed as dist
from bench_peers import TORCHAO, torchao_config
from bench_ranks import run_on_ranks
from benchmarks import (
    PAGE,
    Check,
    Report,
    Timed,
    make_parser,
    markdown,
    medians,
    milliseconds,
    positive,
    ratio,
    section,
    start,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)

OURS, PEER = "fp8_dist", "torchao"
TITLE = "Precompute"
ABOUT = """\
The scales of {layers} weights of {size} x {size} on {ranks} ranks, FSDP2, until they are known;
medians of {repeat} turns of the slowest rank."""


def sharded_model(
    convert: Callable[[nn.Module], object], layers: int, size: int, device: torch.device
) -> nn.Module:
    """Linear layers under FSDP2, one group each, on a mesh over all ranks."""
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers))).to(device)
    convert(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def known(model: nn.Module) -> None:
    """Precompute, and the wait of who first needs one of the scales."""
    precompute_float8_dynamic_scale(model)
    first = next(layer for layer in model.modules() if isinstance(layer, Float8Linear))
    assert first.float8_weight.cache.scaling is not None


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Median seconds until the scales are known, by library; called on every rank."""
    model = partial(sharded_model, layers=args.layers, size=args.size, device=args.device)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    ours = model(partial(convert_to_float8_training, config=config))
    timed = {OURS: Timed(partial(known, ours))}
    if TORCHAO:
        library = bench_peers.torchao
        gathered = torchao_config(TORCHAO[0], enable_fsdp_float8_all_gather=True)
        theirs = model(partial(library.convert_to_float8_training, config=gathered))
        timed[PEER] = Timed(partial(library.precompute_float8_dynamic_scale_for_fsdp, theirs))
    return medians(timed, args, description="precompute")


def table(seconds: dict[str, float]) -> str:
    """Markdown: a row per library."""
    lines = [["library", "ms", "x fp8_dist"]]
    lines += [[name, milliseconds(s), ratio(s, seconds[OURS])] for name, s in seconds.items()]
    return markdown(lines)


def checks(seconds: dict[str, float], least: float | None) -> list[Check]:
    """What `--assert` asks."""
    if least is None:
        return []
    if PEER not in seconds:
        return [Check("torchao is installed", False)]
    faster = seconds[PEER] / seconds[OURS]
    return [Check(f"{faster:.2f}x faster than torchao, at least {least:g}", faster >= least)]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = make_parser(__doc__, repeat=15)
    add = parser.add_argument
    add("--layers", type=positive, default=100)
    add("--size", type=positive, default=512)
    add("--ranks", type=positive, default=2)
    add(
        "--assert",
        dest="asserted",
        type=float,
        metavar="RATIO",
        help="fail unless faster than torchao by this",
    )
    args = start(parser, argv)
    seconds = run_on_ranks(args.ranks, args, measure, args)
    if seconds is None:
        return 0  # rank 0 of a torchrun reports
    about = ABOUT.format(**vars(args))
    report = Report(PAGE, {TITLE: section(args, about, table(seconds))})
    shape = {"layers": args.layers, "size": args.size, "ranks": args.ranks}
    report.data = [shape | {"seconds": seconds}]
    report.checks = checks(seconds, args.asserted)
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(main())
