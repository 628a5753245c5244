"""Times layers of Llama 8B and 70B, and a training step on this machine's GPUs.

    python -m scripts.bench.gpu

Candidates one after the other: nn.Linear in bf16, the library's recipes and torchao's (if it is
installed), eager and compiled. A line is printed when a candidate is measured, and tables at the
end. "ms" is the time of the device, by CUDA events, while the host is ahead. "wall ms" is that of
a step among several, as the host's clock sees them: it is longer where the device waits for the
host.

- Layers: forward and backward of each linear layer's shape; the weight has changed. The widest of
  the 8B model first, eager and compiled, with 8192, 2048 and 8191 rows, then the others with 8192
  rows. (Compiled: that one of each model, as every shape is compiled anew.)
- Step: two blocks of Llama 8B with embedding and head, one sequence of 8192 tokens on each rank,
  under FSDP2 on all GPUs; AdamW (fused).

TFLOP/s count the operations of the linear layers alone, three GEMMs each. Peak memory is that of
a candidate's turn, its parameters included. What does not fit into --budget-minutes is left
out, and named.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from scripts.bench.layers import Shape, layer_of, shape_text
from scripts.common.candidates import BF16, OURS, TORCHAO
from scripts.common.llama import MODELS, LlamaConfig
from scripts.common.markdown import table
from scripts.common.models import after_step, build
from scripts.common.options import positive
from scripts.common.ranks import run_on_ranks
from scripts.common.report import finish, make_parser, start

Variant = tuple[str, bool]  # a candidate, and whether it is compiled
WARM_UP = 3
SLEEP = 4_000_000  # cycles, some 2 ms
COMPILED_LAYER = "w1, w3"
TOKENS = 8192  # of a sequence
FEW, ODD = 2048, 8191  # rows of a layer besides
COMPILED_SHARE = 5  # of the time, where candidates are compiled too
STEPS = 10  # that the host's clock times together
STEP_SHARE = 0.4  # of the time, for the training step


@dataclass(frozen=True)
class Work:
    """A candidate that is ready to run.

    Attributes:
        run: what is timed.
        flops: of its linear layers, on all GPUs.
        tokens: that it processes, on all GPUs.
        before: what is done before each run, outside of the time.
    """

    run: Callable[[], object]
    flops: float
    tokens: int
    before: Callable[[], object] = lambda: None


class Result(NamedTuple):
    """Measurement of a candidate: seconds of the device and of the host, peak bytes of a GPU."""

    name: str
    compiled: bool
    seconds: float
    wall: float
    flops: float
    tokens: int
    peak: int


def variants(kinds: Sequence[bool] = (False, True)) -> list[Variant]:
    """All candidates, eager and compiled; the most wanted first, as time may run out."""
    names = (BF16, "tensorwise", *TORCHAO[:1], *OURS[1:], *TORCHAO[1:])
    every = [(name, compiled) for compiled in kinds for name in names]
    first = [(BF16, False), (BF16, True), ("tensorwise", False), ("tensorwise", True)]
    first += [(name, True) for name in TORCHAO[:1]]
    wanted = [variant for variant in first if variant in every]
    return wanted + [variant for variant in every if variant not in wanted]


def layer_shapes() -> dict[str, Shape]:
    """The linear layers of the two models, without those of equal shape."""
    wide = MODELS["8b"].dim, MODELS["8b"].ffn_dim
    shapes = {f"8b {COMPILED_LAYER}, {rows} rows": (rows, *wide) for rows in (TOKENS, FEW, ODD)}
    for size in ("8b", "70b"):
        d, ffn = MODELS[size].dim, MODELS[size].ffn_dim
        kv = MODELS[size].n_kv_heads * MODELS[size].head_dim
        of_model = {"wq, wo": (d, d), "wk, wv": (d, kv), "w1, w3": (d, ffn), "w2": (ffn, d)}
        shapes |= {f"{size} {layer}": (TOKENS, *features) for layer, features in of_model.items()}
    return {name: shape for name, shape in shapes.items() if name != f"8b {COMPILED_LAYER}"}


def layer_work(shape: Shape, variant: Variant) -> Work:
    """Forward and backward of one linear layer."""
    name, compiled = variant
    layer = layer_of(name, shape, "cuda")
    timed = layer
    if compiled:
        # (In place, torch 2.13 finds nothing to compile in a layer of its own.)
        module: Any = torch.compile(layer.module, fullgraph=True, dynamic=False)
        timed = replace(layer, module=module)
    m, k, n = shape
    return Work(timed.run, 6.0 * m * k * n, m, layer.change_weight)


def step_work(sizes: LlamaConfig, tokens: int, device: str, variant: Variant) -> Work:
    """A training step of a model; FSDP2 shards it over all ranks."""
    name, compiled = variant
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device, (ranks, 1), mesh_dim_names=("dp", "tp"))
    model = build(name, sizes, mesh, device, shard=True, compiled=compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    after = after_step(name, sharded=True)
    batch = torch.randint(sizes.vocab_size, (2, 1, tokens), device=device)

    def step() -> None:
        after(model)
        logits = model(batch[0])
        F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Work(step, linear_flops(model, tokens) * ranks, tokens * ranks)


def linear_flops(model: nn.Module, tokens: int) -> float:
    """Operations of a model's linear layers, in forward and backward."""
    layers = (part for part in model.modules() if isinstance(part, nn.Linear))
    return sum(6.0 * tokens * layer.in_features * layer.out_features for layer in layers)


def event_seconds(work: Work) -> float:
    """The time of one run on the GPU, which sleeps first: the host is ahead, as in training."""
    work.before()
    torch.cuda._sleep(SLEEP)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work.run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def wall_seconds(work: Work) -> float:
    """The mean time of a run among several, on the host's clock, with what is done before."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        work.before()
        work.run()
    synchronize()
    return (time.perf_counter() - begin) / STEPS


def measure(
    work: Work, repeat: int, seconds_of: Callable[[Work], float]
) -> tuple[float, float, int]:
    """The median of the runs after a few, the time of one on the host's clock, the peak bytes.

    The peak is that of the runs that count: the first ones find block sizes. On several ranks each
    is the largest.
    """
    for _ in range(WARM_UP):
        seconds_of(work)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    readings = [seconds_of(work) for _ in range(repeat)]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    found = (statistics.median(readings), wall_seconds(work), peak)
    if not dist.is_initialized():
        return found
    everyone = [found] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    seconds, walls, peaks = zip(*everyone, strict=True)
    return max(seconds), max(walls), max(peaks)


def compare(
    make: Callable[[Variant], Work],
    candidates: Sequence[Variant],
    minutes: float,
    repeat: int,
    seconds_of: Callable[[Work], float] = event_seconds,
    description: str = "",
) -> list[Result]:
    """Measures candidates one after the other for so many minutes; the first one always.

    All ranks stop where rank 0 does. An error of a candidate is printed, on several ranks raised.
    """
    results: list[Result] = []
    deadline = time.monotonic() + 60 * minutes
    for variant in candidates:
        if results and _is_late(deadline):
            break
        # What the candidate before has left is freed.
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            work = make(variant)
            seconds, wall, peak = measure(work, repeat, seconds_of)
        except Exception as error:  # of one candidate: the others are measured
            if not results or dist.is_initialized():
                raise
            first = next(iter(str(error).splitlines()), "")
            print(f"{description}: {shown(*variant)}: {type(error).__name__}: {first}", flush=True)
            continue
        results.append(Result(*variant, seconds, wall, work.flops, work.tokens, peak))
        if description and not (dist.is_initialized() and dist.get_rank()):
            times = f"{1e3 * seconds:.3f} ms, wall {1e3 * wall:.3f} ms, {peak / 1e9:.2f} GB"
            print(f"{description}: {shown(*variant)}: {times}", flush=True)
        del work
    return results


def _is_late(deadline: float) -> bool:
    late = [time.monotonic() > deadline]
    if dist.is_initialized():
        dist.broadcast_object_list(late)
    return late[0]


def results_table(results: Sequence[Result], wanted: Sequence[Variant]) -> str:
    """A line per candidate, the first one bf16 in eager code; names those left out."""
    compiled = next((r for r in results if r[:2] == (BF16, True)), None)
    lines = [
        [
            shown(r.name, r.compiled),
            f"{1e3 * r.seconds:.2f}",
            f"{1e3 * r.wall:.2f}",
            f"{results[0].seconds / r.seconds:.2f}",
            f"{compiled.seconds / r.seconds:.2f}" if compiled else "",
            f"{r.tokens / r.seconds:,.0f}",
            f"{r.flops / r.seconds / 1e12:,.0f}",
            f"{r.peak / 1e9:.2f}",
        ]
        for r in results
    ]
    times = ["candidate", "ms", "wall ms", "x bf16's speed", "x bf16 compiled"]
    header = [*times, "tokens/s", "TFLOP/s", "peak GB"]
    measured = {(r.name, r.compiled) for r in results}
    missing = "; ".join(shown(*variant) for variant in wanted if variant not in measured)
    note = f"Left out for lack of time, or failed: {missing}.\n\n" if missing else ""
    return note + table(header, lines, "lr")


def shown(name: str, compiled: bool) -> str:
    """A candidate's name in tables."""
    return f"{name}, compiled" if compiled else name


def measured_step(sizes: LlamaConfig, tokens: int, minutes: float, repeat: int) -> list[Any]:
    """The steps of all candidates, as tuples; called on every rank.

    (What ranks return must not have types of the main module, whose name differs for them.)
    """
    make = partial(step_work, sizes, tokens, "cuda")
    return [*map(tuple, compare(make, variants(), minutes, repeat, description="step"))]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = make_parser("scripts.bench.gpu", __doc__, repeat=10)
    budget = "for all parts together, beside what compiles when they end; %(default)s"
    parser.add_argument("--budget-minutes", type=float, default=7.0, metavar="MINUTES", help=budget)
    parts = "what to time; default: both"
    parser.add_argument("--part", choices=["layers", "step"], help=parts)
    parser.add_argument("--gpus", type=positive, help="of the training step; default: all")
    args = start(parser, argv)
    if args.device != "cuda" or not torch.cuda.is_available():
        parser.error(
            "there is no CUDA device that this torch can use "
            f"(torch {torch.__version__}, torch.version.cuda {torch.version.cuda}); what can be "
            "derived without one is printed by python -m scripts.bench.gpu_counts"
        )
    share = {"layers": 0.0, "step": 1.0}.get(args.part, STEP_SHARE)
    for_step = share * args.budget_minutes
    tables = layer_tables(args, args.budget_minutes - for_step) if share < 1 else {}
    if args.part == "layers":
        return finish(args, tables)
    torch.cuda.empty_cache()
    gpus = args.gpus or torch.cuda.device_count()
    task = (measured_step, replace(MODELS["8b"], n_layers=2), TOKENS, for_step, args.repeat)
    step = [Result(*each) for each in run_on_ranks(gpus, *task, device="cuda")[0]]
    where = f"{gpus} GPUs" if gpus > 1 else "1 GPU, where it gathers nothing"
    title = f"Step: two blocks of Llama 8B, embedding, head, FSDP2 on {where}"
    return finish(args, tables | {title: results_table(step, variants())})


def layer_tables(args: argparse.Namespace, minutes: float) -> dict[str, str]:
    """All layers; each shape may take its part of the time that is left, compiled ones the most."""
    end = time.monotonic() + 60 * minutes
    shapes = layer_shapes()
    tables = {}
    parts = [COMPILED_SHARE if COMPILED_LAYER in name else 1 for name in shapes]
    for i, (name, shape) in enumerate(shapes.items()):
        left = max(0.0, end - time.monotonic()) / 60 * parts[i] / sum(parts[i:])
        candidates = variants() if COMPILED_LAYER in name else variants([False])
        results = compare(
            partial(layer_work, shape), candidates, left, args.repeat, description=name
        )
        tables[f"Layer {name}, {shape_text(shape)}"] = results_table(results, candidates)
    return tables


if __name__ == "__main__":
    sys.exit(main())
