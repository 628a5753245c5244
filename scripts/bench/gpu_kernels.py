"""GB/s of each Triton kernel in a layer's step of each recipe, with the block sizes that it chose.

    python -m scripts.bench.gpu_kernels
    python -m scripts.bench.gpu_kernels --trace FOLDER

A line is printed for each launch when it is measured: the kernel, its choice, microseconds, and
GB/s of the tensors that it takes, each counted once. ``--trace`` writes a trace of a step of each
recipe instead, for chrome://tracing, and prints its longest kernels.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from fp8_dist.kernels.cuda.triton.launch import Tuned
from scripts.bench.gpu import TOKENS, WARM_UP
from scripts.bench.gpu_probe import seconds
from scripts.bench.layers import Shape, layer_of
from scripts.common.candidates import OURS
from scripts.common.llama import MODELS
from scripts.common.report import make_parser, start

SHAPE: Shape = (TOKENS, MODELS["8b"].dim, MODELS["8b"].ffn_dim)

Launch = tuple[Tuned, tuple[Any, ...], dict[str, Any]]  # a kernel and its arguments


@contextmanager
def launches_noted() -> Iterator[list[Launch]]:
    """Note the launches in the block, and do them."""
    noted: list[Launch] = []
    launch = Tuned.__call__

    def note(tuned: Tuned, *args: Any, **constants: Any) -> None:
        noted.append((tuned, args, constants))
        launch(tuned, *args, **constants)

    with patch.object(Tuned, "__call__", note):
        yield noted


def measured(launch: Launch, repeat: int) -> str:
    """The choice, the time and the rate of a launch."""
    tuned, (grid, key, device, *args), constants = launch

    def run() -> None:
        tuned(grid, key, device, *args, **constants)

    taken = seconds(run, repeat)
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    moved = sum(t.numel() * t.itemsize for t in tensors)
    chosen = tuned.chosen(key)
    sizes = " ".join(f"{name}={chosen[name]}" for name in chosen if name.isupper())
    choice = f"{sizes} warps={chosen['num_warps']}"
    return f"{choice}: {1e6 * taken:.1f} us, {moved / taken / 1e9:,.0f} GB/s"


def time_kernels(name: str, repeat: int) -> None:
    """Print a line for each kernel of a recipe's step, and each of its sizes."""
    layer = layer_of(name, SHAPE, "cuda")
    with launches_noted() as noted:
        layer.change_weight()
        layer.run()
    different = {(id(tuned), args[1], str(constants)): (tuned, args, constants)
                 for tuned, args, constants in noted}  # fmt: skip
    for launch in different.values():
        shown = f"{launch[0].kernel.__name__} {launch[1][1]}"
        print(f"{name}: {shown}: {measured(launch, repeat)}", flush=True)


def trace(name: str, folder: Path) -> None:
    """Write a trace of a recipe's third step, and print its longest kernels."""
    layer = layer_of(name, SHAPE, "cuda")
    step: Callable[[], object] = layer.run
    for _ in range(WARM_UP):
        layer.change_weight()
        step()
    layer.change_weight()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    found.export_chrome_trace(str(folder / f"trace_{name}.json"))
    table = found.key_averages().table(sort_by="self_device_time_total", row_limit=12)
    print(f"{name}\n{table}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = make_parser("scripts.bench.gpu_kernels", __doc__, repeat=10)
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write traces there")
    parser.add_argument("--recipes", nargs="+", default=OURS, choices=OURS, metavar="RECIPE")
    args = start(parser, argv)
    for name in args.recipes:
        if args.trace:
            trace(name, args.trace)
        else:
            time_kernels(name, args.repeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
