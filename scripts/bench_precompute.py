"""Times precompute_float8_dynamic_scale beside torchao's, in one run.

    torchrun --nproc-per-node 2 scripts/bench_precompute.py --assert 4

Each rank holds its shards of `--layers` linear layers of `--size` x `--size` under FSDP2 with
float8 gathers. The two libraries take turns; the medians over `--repeat` calls are compared.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)

try:
    from torchao import float8 as torchao_float8
except ImportError:
    torchao_float8 = None


def sharded_model(
    convert: Callable[[nn.Module], nn.Module], layers: int, size: int, device: torch.device
) -> nn.Module:
    """Linear layers under FSDP2, one group each, on a mesh over all ranks."""
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers))).to(device)
    convert(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def milliseconds(call: Callable[[], None], device: torch.device) -> float:
    """Wall time of one call, all ranks starting together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def measure(layers: int, size: int, repeat: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each call, by library, in turns after one call each to warm up."""
    ours = sharded_model(
        lambda model: convert_to_float8_training(
            model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        ),
        layers,
        size,
        device,
    )
    calls: dict[str, Callable[[], None]] = {
        "fp8_dist": lambda: precompute_float8_dynamic_scale(ours)
    }
    if torchao_float8 is not None:
        config = torchao_float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        theirs = sharded_model(
            lambda model: torchao_float8.convert_to_float8_training(model, config=config),
            layers,
            size,
            device,
        )
        calls["torchao"] = lambda: torchao_float8.precompute_float8_dynamic_scale_for_fsdp(theirs)
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeat):
        for name, call in calls.items():
            times[name].append(milliseconds(call, device))
    return times


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--assert", dest="least", type=float, metavar="RATIO", help="fail below this speedup"
    )
    args = parser.parse_args()
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if use_cuda else None
    device = device or torch.device("cpu")
    times = measure(args.layers, args.size, args.repeat, device)
    medians = {name: statistics.median(values) for name, values in times.items()}
    speedup = medians["torchao"] / medians["fp8_dist"] if "torchao" in medians else None
    if dist.get_rank() == 0:
        if args.json:
            print(json.dumps({"milliseconds": medians, "speedup": speedup, "device": str(device)}))
        else:
            print(
                f"precompute of {args.layers} weights of {args.size} x {args.size} on "
                f"{dist.get_world_size()} ranks, {device.type}, medians of {args.repeat}"
            )
            for name, median in medians.items():
                print(f"  {name:<10}{median:8.2f} ms")
            print(f"  speedup   {speedup:8.2f}" if speedup else "  torchao is not installed")
    dist.destroy_process_group()
    if args.least is None:
        return 0
    return 0 if speedup is not None and speedup >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())
