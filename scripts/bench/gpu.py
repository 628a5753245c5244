"""Times layers of Llama 8B and 70B, and a training step on this machine's GPUs.

    python -m scripts.bench.gpu

All in one run, candidates in turns, times by CUDA events: nn.Linear in bf16, the library's recipes
and torchao's (if it is installed), eager and compiled.

- Layers: forward and backward of each linear layer's shape with 8192 rows; the weight has changed.
  (Compiled: one shape of each model, as every shape is compiled anew.)
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
from tqdm import tqdm

from scripts.bench.layers import Shape, layer_of
from scripts.bench.timing import shape_text
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
    """Measurement of a candidate: the median seconds, and the peak bytes of a GPU."""

    name: str
    compiled: bool
    seconds: float
    flops: float
    tokens: int
    peak: int


def variants(kinds: Sequence[bool] = (False, True)) -> list[Variant]:
    """All candidates, eager and compiled; the most wanted first, as time may run out."""
    names = (BF16, "tensorwise", *TORCHAO[:1], *OURS[1:], *TORCHAO[1:])
    return [(name, compiled) for compiled in kinds for name in names]


def layer_shapes() -> dict[str, Shape]:
    """The linear layers of the two models, without those of equal shape."""
    shapes = {}
    for size in ("8b", "70b"):
        d, ffn = MODELS[size].dim, MODELS[size].ffn_dim
        kv = MODELS[size].n_kv_heads * MODELS[size].head_dim
        of_model = {"wq, wo": (d, d), "wk, wv": (d, kv), "w1, w3": (d, ffn), "w2": (ffn, d)}
        shapes |= {f"{size} {layer}": (TOKENS, *features) for layer, features in of_model.items()}
    return shapes


def layer_work(shape: Shape, variant: Variant) -> Work:
    """Forward and backward of one linear layer."""
    name, compiled = variant
    layer = layer_of(name, shape, "cuda")
    if compiled:
        layer.module.compile(fullgraph=True, dynamic=False)
    m, k, n = shape
    return Work(layer.run, 6.0 * m * k * n, m, layer.change_weight)


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


def measure(work: Work, repeat: int, seconds_of: Callable[[Work], float]) -> tuple[float, int]:
    """The median of the runs after a few, and the bytes allocated at most; with all ranks."""
    for _ in range(WARM_UP):
        seconds_of(work)
    readings = [seconds_of(work) for _ in range(repeat)]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    found = (statistics.median(readings), peak)
    if not dist.is_initialized():
        return found
    everyone = [found] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return max(seconds for seconds, _ in everyone), max(peak for _, peak in everyone)


def compare(
    make: Callable[[Variant], Work],
    candidates: Sequence[Variant],
    minutes: float,
    repeat: int,
    seconds_of: Callable[[Work], float] = event_seconds,
    description: str = "",
) -> list[Result]:
    """Measures candidates one after the other for so many minutes; the first one always.

    All ranks stop where rank 0 does.
    """
    results: list[Result] = []
    deadline = time.monotonic() + 60 * minutes
    silent = True if dist.is_initialized() and dist.get_rank() > 0 else None
    for variant in tqdm(
        candidates, desc=description, unit="candidate", disable=silent, leave=False
    ):
        if results and _is_late(deadline):
            break
        # What the candidate before has left is freed.
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        work = make(variant)
        seconds, peak = measure(work, repeat, seconds_of)
        results.append(Result(*variant, seconds, work.flops, work.tokens, peak))
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
            f"{results[0].seconds / r.seconds:.2f}",
            f"{compiled.seconds / r.seconds:.2f}" if compiled else "",
            f"{r.tokens / r.seconds:,.0f}",
            f"{r.flops / r.seconds / 1e12:,.0f}",
            f"{r.peak / 1e9:.2f}",
        ]
        for r in results
    ]
    header = ["candidate", "ms", "x bf16's speed", "x bf16 compiled", "tokens/s", "TFLOP/s"]
    missing = "; ".join(shown(*variant) for variant in wanted[len(results) :])
    note = f"Left out for lack of time: {missing}.\n\n" if missing else ""
    return note + table([*header, "peak GB"], lines, "lr")


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
    parser.add_argument("--gpus", type=positive, help="of the training step; default: all")
    args = start(parser, argv)
    if args.device != "cuda" or not torch.cuda.is_available():
        parser.error(
            "there is no CUDA device that this torch can use "
            f"(torch {torch.__version__}, torch.version.cuda {torch.version.cuda}); what can be "
            "derived without one is printed by python -m scripts.bench.gpu_counts"
        )
    for_step = STEP_SHARE * args.budget_minutes
    tables = layer_tables(args, args.budget_minutes - for_step)
    torch.cuda.empty_cache()
    gpus = args.gpus or torch.cuda.device_count()
    task = (measured_step, replace(MODELS["8b"], n_layers=2), TOKENS, for_step, args.repeat)
    step = [Result(*each) for each in run_on_ranks(gpus, *task, device="cuda")[0]]
    where = f"{gpus} GPUs" if gpus > 1 else "1 GPU, where it gathers nothing"
    title = f"Step: two blocks of Llama 8B, embedding, head, FSDP2 on {where}"
    return finish(args, tables | {title: results_table(step, variants())})


def layer_tables(args: argparse.Namespace, minutes: float) -> dict[str, str]:
    """All layers; each shape may take its part of the time that is left."""
    end = time.monotonic() + 60 * minutes
    shapes = layer_shapes()
    tables = {}
    for i, (name, shape) in enumerate(shapes.items()):
        left = max(0.0, end - time.monotonic()) / 60 / (len(shapes) - i)
        candidates = variants() if COMPILED_LAYER in name else variants([False])
        results = compare(
            partial(layer_work, shape), candidates, left, args.repeat, description=name
        )
        tables[f"Layer {name}, {shape_text(shape)}"] = results_table(results, candidates)
    return tables


if __name__ == "__main__":
    sys.exit(main())
