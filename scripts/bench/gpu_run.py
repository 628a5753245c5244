"""The cases of each stage of `scripts.bench.gpu`."""

import argparse
import gc
import importlib.metadata
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

from fp8_dist.kernels.cuda import gemm
from fp8_dist.kernels.cuda.triton.launch import Kernel
from fp8_dist.kernels.gemm import block_scaled_mm
from fp8_dist.recipe_names import ExpertsRecipe
from scripts.bench import gpu_results
from scripts.bench.gpu_results import Result, shown
from scripts.bench.layers import Experts, Layer, Shape, layer_of, shape_text
from scripts.bench.step_run import parts_of_step
from scripts.common.candidates import TORCHAO
from scripts.common.llama import MODELS, Llama
from scripts.common.models import build
from scripts.common.recipes import BF16, OURS
from scripts.train import train

Variant = tuple[str, bool]  # a candidate, and whether it is compiled
Case = tuple[str, Callable[[], Result]]
Launch = tuple[Kernel, tuple[Any, ...], dict[str, Any]]  # a kernel and its arguments
Found = dict[str, Any]  # fields of a result
Ready = tuple[Layer, Callable[[], object]]  # a candidate's layer, and its forward and backward

WARM_UP = 3
SLEEP = 4_000_000  # cycles, about 2 ms
STEPS = 10  # the number of steps in one reading of the host's clock
ROWS = 8192
D, FFN = MODELS["8b"].dim, MODELS["8b"].ffn_dim
VOCABULARY = 2048
# The most important first, because a stage may be stopped at any time.
BLOCKS: tuple[Variant, ...] = (
    (BF16, False),
    ("tensorwise", True),
    (BF16, True),
    ("tensorwise", False),
    ("rowwise_folded", True),
    ("torchao tensorwise", True),
    ("rowwise_folded", False),
    ("torchao tensorwise", False),
)
RUNS: list[Variant] = [
    (name, compiled)
    for compiled in (True, False)
    for name in (BF16, "tensorwise", "rowwise_folded")
]
TRAINING = ("--model", "1b", "--steps", "50", "--batch-size", "8", "--seq-len", "512")
TRAINING += ("--lr", "5e-4", "--warmup", "10")
GROUPS = {"128 x 512 rows": 128 * (512,), "26 x (0, 1, 15, 17, 512) rows": 26 * (0, 1, 15, 17, 512)}
EXPERTS = 2048, 1536  # features of a layer of experts
COPIED = 2**30  # bytes, more than the cache holds
SHAPES: tuple[Shape, ...] = ((ROWS, D, FFN), (ROWS, FFN, D), (2048, D, FFN))
E4M3 = torch.float8_e4m3fn


def event_seconds(
    *parts: Callable[[], object], before: Callable[[], object] = lambda: None
) -> list[float]:
    """GPU times of functions. The GPU sleeps first, so that the host is ahead, as in training."""
    before()
    torch.cuda._sleep(SLEEP)
    events = [torch.cuda.Event(enable_timing=True) for _ in (None, *parts)]
    events[0].record()
    for part, end in zip(parts, events[1:], strict=True):
        part()
        end.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]


def readings(
    function: Callable[[], object], repeat: int, before: Callable[[], object] = lambda: None
) -> tuple[float, ...]:
    """The GPU times of several runs of a function."""
    return tuple(event_seconds(function, before=before)[0] for _ in range(repeat))


def wall_seconds(step: Callable[[], object]) -> float:
    """The mean time of `STEPS` steps, on the host's clock."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / STEPS


def allocated() -> int:
    """Reset the peak, and return the bytes of device memory that tensors use."""
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def free() -> None:
    """Release memory that is no longer used, including that of compiled code."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def case(name: str, known: Result, measure: Callable[[], Found]) -> Case:
    """A case whose result has the fields of `known` even if `measure` fails."""

    def function() -> Result:
        try:
            return replace(known, **measure())
        except Exception as error:  # torch, Triton and the compiler raise many types
            return replace(known, error=shown(error))

    return name, function


def versions(args: argparse.Namespace) -> Iterator[Case]:
    """A case that notes the GPU and the installed releases."""

    def measure() -> Result:
        gpu, texts = torch.cuda.get_device_properties(0), []
        for name in ("torch", "triton", "torchao"):
            with suppress(importlib.metadata.PackageNotFoundError):
                texts.append(f"{name} {importlib.metadata.version(name)}")
        gigabytes = f"{gpu.total_memory / 1e9:.0f} GB"
        return Result(note=", ".join([gpu.name, gigabytes, f"Python {sys.version[:6]}", *texts]))

    yield "versions", measure


def rate_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Cases for copies, and for the GEMMs of each shape."""
    for name in copies():
        yield name, partial(copy_rate, name, args.repeat)
    for m, k, n in SHAPES:
        known = Result(shape=shape_text((m, k, n)), flops=2.0 * m * k * n)
        for name in gemms((16, 16, 16)):
            measure = partial(gemm_rate, name, (m, k, n), args.repeat)
            yield case(f"{known.shape}, {name}", known, measure)


def copies() -> dict[str, tuple[Callable[[], object], int]]:
    """By name, functions that move data, and the number of bytes that they read and write."""
    source = torch.empty(COPIED // 2, dtype=torch.bfloat16, device="cuda").fill_(1)
    target, rows = torch.empty_like(source), COPIED // 2 // D
    matrix = source.view(torch.uint8)[: rows * D].view(rows, D)
    return {
        "copy": (lambda: target.copy_(source), 2 * COPIED),
        "amax": (lambda: source.view(-1, D).abs().amax(), COPIED),
        "elementwise": (lambda: torch.mul(source, 2, out=target), 2 * COPIED),
        "transposing copy of bytes": (lambda: matrix.t().contiguous(), 2 * matrix.numel()),
    }


def copy_rate(name: str, repeat: int) -> Result:
    """Measure the rate of one of the copies."""
    run, moved = copies()[name]
    readings(run, WARM_UP)
    return Result(readings=readings(run, repeat), bytes=moved)


def gemms(shape: Shape) -> dict[str, Callable[[], object]]:
    """By name, functions that multiply random ``[M, K]`` and ``[K, N]`` matrices."""
    m, k, n = shape
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = torch.randn(n, k, device="cuda").bfloat16().t()
    a8, b8 = a.to(E4M3), b.t().to(E4M3).t()
    one, rows, columns = (torch.ones(size, device="cuda") for size in ((), (m, 1), (1, n)))
    sizes = (m, k // 128), (k // 128, n // 128)
    exponents = [torch.full(size, 127, dtype=torch.uint8, device="cuda") for size in sizes]

    def scaled(scale_a: Tensor, scale_b: Tensor, fast: bool) -> Callable[[], object]:
        options: Any = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
        return lambda: torch._scaled_mm(a8, b8, scale_a, scale_b, **options)

    def in_blocks() -> object:
        if gemm.device_kind(a.device) != "hopper":
            raise RuntimeError("the device has no GEMM for blocks of 128")
        blocks = (1, 128, 0, 0), (128, 128, 0, 0)
        return block_scaled_mm(a8, b8, *exponents, *blocks, torch.bfloat16, False)

    return {
        "bf16": lambda: a @ b,
        "float8, fast accumulation": scaled(one, one, True),
        "float8": scaled(one, one, False),
        "float8 by rows, fast accumulation": scaled(rows, columns, True),
        "float8 by rows": scaled(rows, columns, False),
        "float8 in blocks of 128": in_blocks,
    }


def gemm_rate(name: str, shape: Shape, repeat: int) -> Found:
    """Measure the times of one of the GEMMs."""
    run = gemms(shape)[name]
    readings(run, WARM_UP)
    return {"readings": readings(run, repeat)}


def kernel_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Cases for the kernels of each recipe's step, with a copy before and after all of them."""
    yield "copy, first", partial(copy_rate, "copy", args.repeat)
    for recipe in OURS:
        known = Result(recipe=recipe, shape=shape_text((ROWS, D, FFN)))
        yield case(recipe, known, partial(kernel_rates, recipe, args.repeat))
    yield "copy, last", partial(copy_rate, "copy", args.repeat)


def kernel_rates(recipe: str, repeat: int) -> Found:
    """Measure each distinct kernel launch of a step: its time and rate."""
    layer, launch = layer_of(recipe, (ROWS, D, FFN), "cuda"), Kernel.__call__
    noted: dict[str, Launch] = {}

    def note(kernel: Kernel, *args: Any, **constants: Any) -> None:
        shapes = [tuple(x.shape) for x in tensors_of(args)]
        noted[f"{kernel.kernel.__name__} {shapes} {constants}"] = kernel, args, constants
        launch(kernel, *args, **constants)

    with patch.object(Kernel, "__call__", note):
        layer.change_weight()
        layer.run()
    each = (kernel_rate(*of, repeat) for of in noted.values())
    return {"note": "; ".join(each)}


def tensors_of(args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among the arguments of a launch."""
    return [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]


def kernel_rate(
    kernel: Kernel, args: tuple[Any, ...], constants: dict[str, Any], repeat: int
) -> str:
    """Measure the time and the rate of a launch."""
    cache = torch.empty(2**28, dtype=torch.uint8, device="cuda")  # larger than the GPU's cache
    run = partial(kernel, *args, **constants)
    readings(run, WARM_UP)
    seconds = statistics.median(readings(run, repeat, cache.zero_))
    rate = sum(x.numel() * x.itemsize for x in tensors_of(args)) / seconds
    return f"{kernel.kernel.__name__} {1e6 * seconds:.1f} us {rate / 1e9:,.0f} GB/s"


def label(variant: Variant) -> str:
    """The name of a candidate, for names of cases."""
    name, compiled = variant
    return f"{name} compiled" if compiled else name


def layer_variants(rows: int) -> list[Variant]:
    """The candidates for a layer, the most important first; all of them only for ``ROWS`` rows."""
    both = [(name, kind) for name in (BF16, *OURS) for kind in (False, True)]
    every = [*both[:6], *((name, True) for name in TORCHAO[:2]), *both[6:]]
    few = (BF16, "tensorwise", "rowwise_folded", *TORCHAO[:1])
    return every if rows == ROWS else [variant for variant in every if variant[0] in few]


def layer_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Cases for each shape: turns of all candidates, then host times of each candidate."""
    # The compiled graphs of all candidates belong to one function.
    torch._dynamo.config.recompile_limit = 64
    for rows in args.rows:
        m, k, n = shape = rows, D, FFN
        ready: dict[Variant, Ready | None] = {}  # None: the candidate failed
        for turn in (*(f"turn {1 + turn}" for turn in range(args.turns)), "wall"):
            again = [] if turn == "wall" else [((BF16, False), ", again")]
            for variant, suffix in [*((variant, "") for variant in layer_variants(rows)), *again]:
                if ready.get(variant, True) is None:
                    continue
                name = f"{shape_text(shape)}, {label(variant)}{suffix}, {turn}"
                about = {"tokens": m, "flops": 6.0 * m * k * n, "shape": shape_text(shape)}
                known = Result(recipe=variant[0], compiled=variant[1], **about)
                measure = partial(measured_layer, ready, shape, variant, turn == "wall", args)
                yield case(name, known, measure)
        ready.clear()
        free()


def measured_layer(
    ready: dict[Variant, Ready | None],
    shape: Shape,
    variant: Variant,
    wall: bool,
    args: argparse.Namespace,
) -> Found:
    """Measure a candidate's turn: forward and backward. Its layer is kept for the next turn."""
    others = None
    candidate = ready.setdefault(variant, None)
    if candidate is None:
        others = allocated()
        candidate = layer_run(shape, variant)
        for _ in range(WARM_UP):
            event_seconds(candidate[1], before=candidate[0].change_weight)
        allocated()
        ready[variant] = candidate
    layer, forward_and_backward = candidate

    def step() -> None:
        layer.change_weight()
        forward_and_backward()

    if wall:
        return {"readings": tuple(wall_seconds(step) for _ in range(3))}
    fields: Found = {"readings": readings(forward_and_backward, args.repeat, layer.change_weight)}
    if others is not None:  # in later turns, gradients of others come and go
        fields["peak"] = torch.cuda.max_memory_allocated() - others
    return fields


def layer_run(shape: Shape, variant: Variant) -> Ready:
    """Make a candidate's layer, and the function that runs it."""
    name, compiled = variant
    layer = layer_of(name, shape, "cuda")
    if not compiled:
        return layer, layer.run
    # (layer.module.compile(): torch 2.13 finds nothing to compile in a layer on its own.)
    module: Any = torch.compile(layer.module, fullgraph=True, dynamic=False)
    return layer, replace(layer, module=module).run


def block_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Cases for the step and the optimizer of each candidate, and of bf16 a second time."""
    variants = [variant for variant in BLOCKS if variant[0] in (BF16, *OURS, *TORCHAO)]
    for variant, again in [*((variant, "") for variant in variants), ((BF16, False), ", again")]:
        about = {"tokens": args.tokens, "shape": f"{args.blocks} blocks x {args.tokens} tokens"}
        known = Result(recipe=variant[0], compiled=variant[1], **about)
        updates: list[float] = []
        measure = partial(measured_blocks, args, variant, updates)
        yield case(f"{label(variant)}{again}, step", known, measure)
        if updates:
            measure = partial(dict, readings=tuple(updates))
            yield case(f"{label(variant)}{again}, optimizer", known, measure)


def measured_blocks(args: argparse.Namespace, variant: Variant, updates: list[float]) -> Found:
    """Measure forward and backward of some blocks; append times of optimizer steps to `updates`."""
    free()
    others = allocated()
    name, compiled = variant
    sizes = replace(
        MODELS["8b"], n_layers=args.blocks, vocab_size=VOCABULARY, max_seq_len=args.tokens
    )
    model = build(name, sizes, device="cuda", compiled=compiled)
    step, update = parts_of_step(name, model, sequence(model, args.tokens), sharded=False)
    for _ in range(WARM_UP):
        event_seconds(step, update)
    allocated()
    seconds = [event_seconds(step, update) for _ in range(args.repeat)]
    updates += [update for _, update in seconds]
    return {
        "readings": tuple(step for step, _ in seconds),
        "flops": linear_flops(model, args.tokens),
        "peak": torch.cuda.max_memory_allocated() - others,
        "note": f"loss {step().item():.4f} after {WARM_UP + args.repeat} steps",
    }


def sequence(model: Llama, tokens: int) -> tuple[Tensor, Tensor]:
    """Random tokens and targets, the same for all candidates."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(model.config.vocab_size, (2, 1, tokens), generator=generator)
    first, second = batch.to(model.cos.device)
    return first, second


def linear_flops(model: nn.Module, tokens: int) -> float:
    """The FLOPs of a model's linear layers in forward and backward."""
    layers = (part for part in model.modules() if isinstance(part, nn.Linear))
    return sum(6.0 * tokens * layer.in_features * layer.out_features for layer in layers)


def expert_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Cases for experts with equal, then with unequal groups, in each recipe."""
    for title, groups in GROUPS.items():
        rows, (k, n) = sum(groups), EXPERTS
        for name in (BF16, *get_args(ExpertsRecipe), f"{BF16}, again"):
            recipe = name.partition(",")[0]
            about = {"tokens": rows, "flops": 6.0 * rows * k * n, "shape": f"{title} x {k} x {n}"}
            measure = partial(measured_experts, recipe, groups, args.repeat)
            yield case(f"{title}, {name}", Result(recipe=recipe, **about), measure)


def measured_experts(name: str, groups: Sequence[int], repeat: int) -> Found:
    """Measure forward and backward of a layer of experts."""
    free()
    others = allocated()
    experts = Experts(name, groups, EXPERTS, "cuda")
    readings(experts.run, WARM_UP, experts.clear)
    allocated()
    seconds = readings(experts.run, repeat, experts.clear)
    return {"readings": seconds, "peak": torch.cuda.max_memory_allocated() - others}


def training_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Cases for runs of `scripts.train.train`, with the same weights, text and number of steps."""
    options = dict(zip(TRAINING[::2], TRAINING[1::2], strict=True))
    tokens = int(options["--batch-size"]) * int(options["--seq-len"])
    for variant in RUNS:
        known = Result(recipe=variant[0], compiled=variant[1], shape=options["--model"])
        measure = partial(trained, variant, tokens)
        yield case(label(variant), replace(known, tokens=tokens), measure)


def trained(variant: Variant, tokens: int) -> Found:
    """Train, and return the host times of the steps after the warm-up, and some of the losses."""
    free()
    with tempfile.TemporaryDirectory() as folder:
        words = ["--recipe", variant[0], "--out", folder, *["--compile"] * variant[1]]
        if train.main([*words, *TRAINING]):
            raise RuntimeError("the training failed; the log says why")
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    told = sorted({len(rows) * part // 4 for part in (1, 2, 3, 4)})
    losses = ", ".join(f"{rows[n - 1]['loss']:.4f} after {n}" for n in told)
    return {
        "readings": tuple(tokens / row["tokens_per_second"] for row in rows[WARM_UP:]),
        "peak": int(max(row["memory_bytes"] for row in rows)),
        "note": f"loss {losses} steps",
    }


def nccl_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Cases in a group of one rank, with a model so small that FSDP2's host time dominates."""
    for name in (BF16, "tensorwise", *TORCHAO[:1]):
        known = Result(recipe=name, shape="debug")
        measure = partial(measured_alone, name, torch.device("cuda", 0), args.repeat)
        yield case(f"nccl, one rank, {name}", known, measure)


def measured_alone(name: str, device: torch.device, repeat: int) -> Found:
    """Measure training steps under FSDP2 in a group of one rank, after an all-reduce."""
    options: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        options = {"backend": "nccl", "device_id": device}
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
    try:
        ones = torch.ones(2**20, device=device)
        dist.all_reduce(ones)
        mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("dp", "tp"))
        model = build(name, MODELS["debug"], mesh, device, shard=True)
        batch = sequence(model, MODELS["debug"].max_seq_len)
        step, update = parts_of_step(name, model, batch, sharded=True)
        seconds = [sum(event_seconds(step, update)) for _ in range(WARM_UP + repeat)]
        note = f"the mean of a sum of ones is {ones.mean().item():g}, loss {step().item():.4f}"
        return {"readings": tuple(seconds[WARM_UP:]), "note": note}
    finally:
        dist.destroy_process_group()


PARTS = {
    "versions": versions,
    "rates": rate_cases,
    "kernels": kernel_cases,
    "layers": layer_cases,
    "blocks": block_cases,
    "experts": expert_cases,
    "nccl": nccl_cases,
    "training": training_cases,
}


def run(args: argparse.Namespace) -> int:
    return gpu_results.run(args, PARTS[args.part](args))
