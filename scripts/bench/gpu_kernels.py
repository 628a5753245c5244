"""GB/s of each Triton kernel in a layer's step of each recipe, with the block sizes that it chose.

    python -m scripts.bench.gpu_kernels
    python -m scripts.bench.gpu_kernels --trace FOLDER

A stage of a day (see gpu_results). Bytes are those of the tensors that a kernel takes, each counted
once; the cache has none of them before. The rate of a copy is measured first and last. ``--trace``
instead writes trace.json.gz, a step of the first of the recipes for chrome://tracing, and notes its
longest kernels.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from fp8_dist.kernels.cuda.triton.launch import Tuned
from scripts.bench.gpu import (
    FFN,
    ROWS,
    WARM_UP,
    Case,
    D,
    failed_before,
    make_parser,
    readings,
    run_stage,
)
from scripts.bench.gpu_probe import copy_rate
from scripts.bench.gpu_results import Result
from scripts.bench.layers import Layer, Shape, layer_of, shape_text
from scripts.common.candidates import OURS

SHAPE: Shape = (ROWS, D, FFN)
CACHE = 2**28  # bytes, more than it holds
LONGEST = 12  # kernels of a trace that are named

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


@lru_cache(maxsize=1)
def launches(recipe: str) -> tuple[dict[str, Launch], Layer]:
    """The different launches of a recipe's step, and what keeps the memory that they name."""
    layer = layer_of(recipe, SHAPE, "cuda")
    with launches_noted() as noted:
        layer.change_weight()
        layer.run()
    different = {}
    for tuned, args, constants in noted:
        name, shapes = tuned.kernel.__name__, [tuple(x.shape) for x in tensors_of(args)]
        kind = f"{max(shapes, key=math.prod)} {constants}".replace("'", "")
        different[name, str(shapes), kind] = tuned, args, constants
    names, found = Counter[str](), {}
    for (name, _, kind), launch in different.items():
        names[name] += 1
        found[f"{name} {names[name]}: {kind}"] = launch
    return found, layer


def tensors_of(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors among a launch's arguments."""
    return [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]


def found_launches(recipe: str) -> Result:
    """Run a recipe's step for the first time: its kernels are compiled, and choose."""
    return Result(
        recipe=recipe, shape=shape_text(SHAPE), note=f"{len(launches(recipe)[0])} kernels"
    )


def rate(recipe: str, launch: Launch, repeat: int) -> Result:
    """The choice, the time and the bytes of a launch."""
    tuned, args, constants = launch
    cache = torch.empty(CACHE, dtype=torch.uint8, device="cuda")
    run = partial(tuned, *args, **constants)
    with patch.object(tuned, "_fastest", {}) as found:
        readings(run, WARM_UP)
        seconds = readings(run, repeat, cache.zero_)
    (chosen,) = found.values()
    sizes = " ".join(f"{name}={chosen[name]}" for name in chosen if name.isupper())
    return Result(
        recipe=recipe,
        shape=shape_text(SHAPE),
        readings=seconds,
        bytes=sum(x.numel() * x.itemsize for x in tensors_of(args)),
        note=f"{sizes} warps={chosen['num_warps']}".strip(),
    )


def trace(recipe: str, folder: Path) -> Result:
    """Write a trace of a recipe's step, and note its longest kernels."""
    layer = layer_of(recipe, SHAPE, "cuda")
    readings(layer.run, WARM_UP, layer.change_weight)
    layer.change_weight()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        layer.run()
        torch.cuda.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(folder / "trace.json.gz"))
    every = [e for e in found.key_averages() if e.device_type == DeviceType.CUDA]
    every.sort(key=lambda e: -e.self_device_time_total)
    longest = [f"{e.key[:70]} {e.self_device_time_total:.0f} us" for e in every[:LONGEST]]
    return Result(recipe=recipe, shape=shape_text(SHAPE), note="; ".join(longest))


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """The launches of each recipe, between two copies; or the trace."""
    if args.trace:
        yield "trace", partial(trace, args.recipes[0], args.trace)
        return
    failed = failed_before(args)
    yield "copy, first", partial(copy_rate, "copy", args.repeat)
    for recipe in args.recipes:
        yield f"{recipe}: launches", partial(found_launches, recipe)
        if f"{recipe}: launches" in failed:
            continue
        try:
            found, _ = launches(recipe)
        except Exception:  # its line says why
            continue
        for name, launch in found.items():
            yield f"{recipe}: {name}", partial(rate, recipe, launch, args.repeat)
    yield "copy, last", partial(copy_rate, "copy", args.repeat)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = make_parser("scripts.bench.gpu_kernels", __doc__, "kernel rates", repeat=10)
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write a trace there")
    parser.add_argument("--recipes", nargs="+", default=OURS, choices=OURS, metavar="RECIPE")
    return run_stage(parser, argv, cases)


if __name__ == "__main__":
    sys.exit(main())
