"""Stages that measure time: of steps and collectives on all ranks, of experts on one GPU.

Candidates follow each other, and the first one, bf16, is measured again at the end. Tokens and
flops (of blocks' weights, or of a layer) are those of one GPU, and peaks those of one candidate.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from fp8_dist.fsdp import clip_grad_norm_, set_gradient_transport
from fp8_dist.recipe_names import ExpertsRecipe
from scripts.bench.layers import Experts, shape_text
from scripts.common.candidates import TORCHAO
from scripts.common.llama import MODELS
from scripts.common.models import after_step, build, device_mesh
from scripts.common.recipes import BF16
from scripts.prove.checks import everyone
from scripts.prove.results import Case, Result, Worker
from scripts.prove.runner import Place

Found = dict[str, Any]  # fields of a result
Run = Callable[[], object]

# Models, and tokens of a sequence; the most wanted first.
ORDER = (("8b", 8192), ("8b", 2048), ("70b", 8192), ("1b", 2048), ("1b", 8192), ("70b", 2048))
ON_CPUS = (("debug", 64),)
MOST_BLOCKS = {"1b": 16, "8b": 8, "70b": 4, "debug": 2}  # more would only take longer
MANY, VOCABULARY = 8192, 2048  # of tokens, which keep a GPU busy; and of all models
COLLECTIVES = [("all-gather", torch.bfloat16), ("all-gather", torch.uint8)]
COLLECTIVES += [("reduce-scatter", torch.float32), ("reduce-scatter", torch.bfloat16)]
COLLECTIVES += [("all-to-all", torch.uint8)]
WARM_UP, READINGS, STEPS = 3, 5, 4  # the last is the number of runs in a reading by the host
GROUPS = {"128 x 512 rows": 128 * (512,), "26 x (0, 1, 15, 17, 512) rows": 26 * (0, 1, 15, 17, 512)}
EXPERTS = 2048, 1536  # features of layers of experts


def host_seconds(run: Run, device: torch.device, count: int = STEPS) -> float:
    """The mean time of some runs, on the host's clock."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begin = perf_counter()
    for _ in range(count):
        run()
    wait()
    return (perf_counter() - begin) / count


def gpu_seconds(run: Run, before: Run = lambda: None) -> tuple[float, ...]:
    """GPU times of runs after a warm-up. The GPU sleeps first, so that the host is ahead."""
    seconds = []
    for _ in range(WARM_UP + READINGS):
        before()
        torch.cuda._sleep(4_000_000)  # cycles, about 2 ms
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return tuple(seconds[WARM_UP:])


def free() -> int:
    """Release memory and compiled code; reset the peak; return the bytes that tensors still use."""
    torch._dynamo.reset()
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


class Setting(NamedTuple):
    """What all candidates of a table share. Each data-parallel rank has a sequence of `tokens`."""

    model: str
    dp: int
    tp: int
    tokens: int
    blocks: int

    @property
    def shape(self) -> str:
        """A text for people."""
        mesh = f"FSDP2 {self.dp}" + f" x TP {self.tp}" * (self.tp > 1)
        return f"{self.model}, {self.blocks} blocks, {mesh}, {self.tokens:,} tokens"


class Candidate(NamedTuple):
    """A model, the mode of its step, and whether gradients and TP's sums travel in float8."""

    name: str
    mode: str = "compiled"  # or "eager"; or "graph": compiled, and the step as one CUDA graph
    gradients: bool = False
    sums: bool = False
    again: str = ""  # distinguishes names of cases

    @property
    def recipe(self) -> str:
        """The name and what else is in float8, for people."""
        coded = " and ".join(["gradients"] * self.gradients + ["sums"] * self.sums)
        return f"{self.name}, float8 {coded}" if coded else self.name


def block_weights(model: str) -> int:
    """The number of elements of a block's weights."""
    sizes = MODELS[model]
    attention = 2 * sizes.dim * (sizes.dim + sizes.n_kv_heads * sizes.head_dim)
    return attention + 3 * sizes.dim * sizes.ffn_dim


def settings(place: Place) -> Iterator[Setting]:
    """The settings, with as many blocks as fit, up to a limit; the most wanted first."""
    on_gpus, memory = place.device.type == "cuda", 1e12
    if on_gpus:
        memory = 0.85 * min(everyone(torch.cuda.get_device_properties(place.device).total_memory))
    for model, tokens in ORDER if on_gpus else ON_CPUS:
        sizes, weights = MODELS[model], block_weights(model)
        for tp in (1, 2) if place.ranks % 2 == 0 else (1,):
            # Weights, gradients and two moments in fp32, and what a block keeps for its backward;
            # then two blocks' whole weights in bf16, and their gradients also in fp32.
            each = 16 * weights / place.ranks + (24 * sizes.dim + 12 * sizes.ffn_dim) * tokens / tp
            blocks = min(MOST_BLOCKS[model], int((memory - 16 * weights / tp) / each))
            if blocks > 0:
                yield Setting(model, place.ranks // tp, tp, tokens, blocks)


def time(worker: Worker, place: Place) -> None:
    """Measure compiled steps; with few tokens also graphs and eager steps, which otherwise wait."""
    on_gpus, chosen = place.device.type == "cuda", [*settings(place)]
    modes, names = ("graph", "eager")[1 - on_gpus :], (BF16, "tensorwise")
    rest, cases = [Candidate(name, mode) for mode in modes for name in names], list[Case]()
    for setting in chosen:
        # (On CPUs, torchao's compiled steps take minutes.)
        wanted = [*map(Candidate, (BF16, *TORCHAO[:on_gpus], "tensorwise", "rowwise_folded"))]
        if setting.dp > 1:
            wanted.append(Candidate("tensorwise", gradients=True, sums=setting.tp > 1))
        if setting.tp > 1:
            wanted.append(Candidate("tensorwise", sums=True))
        wanted += [*rest * (setting.tokens < MANY), Candidate(BF16, again=", again")]
        cases += step_cases(setting, wanted, place)
        if setting is chosen[0] and place.ranks > 1:
            cases += collective_cases(place)
    for setting in chosen:
        cases += step_cases(setting, rest * (setting.tokens >= MANY), place)
    worker.run(cases)


def step_cases(setting: Setting, wanted: list[Candidate], place: Place) -> Iterator[Case]:
    """Cases for steps of candidates."""
    for each in wanted:
        about: Any = {"shape": setting.shape, "tokens": setting.tokens // setting.tp}
        known = Result(recipe=each.recipe, compiled=each.mode != "eager", **about)
        name = f"{setting.shape}, {each.recipe}, {each.mode}{each.again}"
        yield Case(name, partial(measured_step, setting, each, place.device), known)


def measured_step(setting: Setting, candidate: Candidate, device: torch.device) -> Found:
    """Measure steps, on the host's clock and in a profile."""
    others, run = free(), whole_step(setting, candidate, device)
    host_seconds(run, device, WARM_UP)
    seconds = tuple(host_seconds(run, device) for _ in range(READINGS))
    weights = setting.blocks * block_weights(setting.model)
    found: Found = {"readings": seconds, "flops": 6.0 * weights * setting.tokens / setting.tp}
    if device.type == "cuda":
        found |= {"peak": torch.cuda.max_memory_allocated() - others, "values": profiled(run)}
    return found


def whole_step(setting: Setting, candidate: Candidate, device: torch.device) -> Run:
    """Build a model; return a function that runs a step as docs/fsdp2.md captures it."""
    on_gpus, wire = device.type == "cuda", "float8" if candidate.sums else None
    mesh = device_mesh(device.type, (setting.dp, setting.tp), mesh_dim_names=("dp", "tp"))
    changes: Any = {"vocab_size": VOCABULARY, "max_seq_len": setting.tokens}
    sizes = replace(MODELS[setting.model], n_layers=setting.blocks, **changes)
    backend = candidate.mode != "eager" and ("inductor" if on_gpus else "aot_eager")
    how: Any = {"shard": True, "compiled": backend, "reduce_transport": wire}
    model = build(candidate.name, sizes, mesh, device, **how)
    if candidate.gradients:
        set_gradient_transport(model, "float8")
    batch = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    inputs, targets = torch.randint(VOCABULARY, (2, 1, setting.tokens), generator=batch).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=on_gpus, capturable=on_gpus)
    update = after_step(candidate.name, sharded=True)

    def step() -> None:
        update(model)
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    if candidate.mode != "graph":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        host_seconds(step, device, WARM_UP)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def profiled(run: Run, count: int = 2) -> dict[str, float]:
    """Milliseconds of a run in which the GPU is busy, in which it communicates, and only that."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            run()
        torch.cuda.synchronize()
    kernels: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for event in profile.events():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            times = event.time_range
            kernels["nccl" in event.name].append((times.start / 1e3, times.end / 1e3))
    busy, others = covered(kernels[True] + kernels[False]), covered(kernels[False])
    found = {"busy": busy, "communication": covered(kernels[True]), "exposed": busy - others}
    return {f"{name} ms": ms / count for name, ms in found.items()} if busy else {}


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def collective_cases(place: Place) -> Iterator[Case]:
    """Cases for collectives of a block's weights or gradients. Bytes are those of other ranks."""
    for model in dict(ORDER if place.device.type == "cuda" else ON_CPUS):
        shape = f"a block of {model}, {place.ranks} ranks"
        part = -(-block_weights(model) // place.ranks)
        for kind, dtype in COLLECTIVES:
            known = Result(shape=shape, bytes=(place.ranks - 1) * part * dtype.itemsize)
            name = f"{shape}, {kind}, {str(dtype).removeprefix('torch.')}"
            yield Case(name, partial(measured_collective, kind, dtype, part, place), known)


def measured_collective(kind: str, dtype: torch.dtype, part: int, place: Place) -> Found:
    """Measure a collective of parts of this many elements."""
    one = torch.ones(part, dtype=dtype, device=place.device)
    whole, other = (one.repeat(place.ranks) for _ in range(2))
    run = {
        "all-gather": lambda: dist.all_gather_into_tensor(whole, one),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(one, whole),
        "all-to-all": lambda: dist.all_to_all_single(other, whole),
    }[kind]
    host_seconds(run, place.device, WARM_UP)
    return {"readings": tuple(host_seconds(run, place.device) for _ in range(READINGS))}


def experts(worker: Worker, place: Place) -> None:
    """Measure experts with equal, then with unequal groups, in each recipe."""
    cases = []
    for title, groups in GROUPS.items():
        rows, shape = sum(groups), f"{title} x {shape_text(EXPERTS)}"
        known = Result(shape=shape, tokens=rows, flops=6.0 * rows * math.prod(EXPERTS))
        for name in (BF16, *get_args(ExpertsRecipe), f"{BF16}, again"):
            recipe = name.partition(",")[0]
            measure = partial(measured_experts, recipe, groups)
            cases.append(Case(f"{title}, {name}", measure, replace(known, recipe=recipe)))
    worker.run(cases)


def measured_experts(recipe: str, groups: tuple[int, ...]) -> Found:
    """Measure forward and backward of experts on the GPU, and on the host."""
    others, made = free(), Experts(recipe, groups, EXPERTS, "cuda")
    seconds = gpu_seconds(made.run, made.clear)
    peak = torch.cuda.max_memory_allocated() - others
    host = host_seconds(lambda: (made.clear(), made.run()), torch.device("cuda"))
    return {"readings": seconds, "peak": peak, "values": {"host ms": 1e3 * host}}
