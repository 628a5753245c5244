"""The steps of `scripts.bench.host`."""

import argparse
import gc
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scripts.bench import timing
from scripts.bench.host import COMPILED
from scripts.bench.timing import Timed, milliseconds, ratio
from scripts.common.llama import Llama, LlamaConfig
from scripts.common.markdown import table
from scripts.common.models import after_step, build, parts_to_compile
from scripts.common.recipes import BF16
from scripts.common.report import finish
from scripts.common.sizes import Mixture
from scripts.plan.world import fake_world

PARTS = ("update", "forward", "backward", "optimizer")
LINEAR = 7  # layers in a block; with experts three of them are grouped
TOKENS, VOCABULARY, HEADS, TOP_K, WARM_UP = 1024, 1024, 16, 2, 3
Step = Counter[str]  # seconds by part


class Candidate(NamedTuple):
    """A candidate to time."""

    model: Llama
    step: Callable[[], None]
    steps: list[Step]  # each step adds its seconds


def candidate_of(candidate: str, mesh: DeviceMesh, args: argparse.Namespace) -> Candidate:
    """Build a candidate."""
    name, compiled, _ = candidate.partition(COMPILED)
    widths = (HEADS, HEADS, 4 * args.dim, VOCABULARY)
    mixture = args.experts and Mixture(args.experts, min(TOP_K, args.experts), args.dim)
    sizes = LlamaConfig(args.dim, args.blocks, *widths, max_seq_len=TOKENS, mixture=mixture)
    model = build(name, sizes, mesh, "meta", shard=True, compiled=bool(compiled))
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    after, clock = after_step(name, sharded=True), timing.CLOCKS[args.clock]
    tokens = torch.empty(1, TOKENS, dtype=torch.int64, device="cuda")
    losses: list[torch.Tensor] = []
    steps: list[Step] = []

    def forward() -> None:
        losses.append(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))

    def optimize() -> None:
        optimizer.step()
        optimizer.zero_grad()

    passes = [("forward", forward), ("backward", lambda: losses.pop().backward())]
    passes *= args.micro_batches
    parts = [("update", lambda: after(model)), *passes, ("optimizer", optimize)]

    def step() -> None:
        seconds: Step = Counter()
        for part, run in parts:
            begin = clock()
            run()
            seconds[part] += clock() - begin
        steps.append(seconds)

    return Candidate(model, step, steps)


def guards_of(model: Llama) -> int | None:
    """The number of conditions that dynamo checks in a call of a compiled block; else None."""
    count = 0
    for part in parts_to_compile(model.layers[0]):
        # (Only a compiled part has a forward of its own, see compile_blocks.)
        if "forward" not in vars(part):
            return None
        (entry,) = _debug_get_cache_entry_list(part.forward.__func__.__code__)
        lines = str(entry.guard_manager).splitlines()
        count += sum("+- " in line and "Manager" not in line for line in lines)
    return count


def measure(mesh: DeviceMesh, args: argparse.Namespace) -> dict[str, Candidate]:
    """Time each candidate, and the bf16 to compare it with."""
    names = dict.fromkeys([*map(bf16_for, args.candidates), *args.candidates])
    made = {name: candidate_of(name, mesh, args) for name in names}
    for candidate in made.values():
        candidate.step()  # compiles
    # Collect garbage between steps, and only that of steps.
    gc.disable()
    gc.collect()
    gc.freeze()
    timed = {name: Timed(candidate.step, gc.collect) for name, candidate in made.items()}
    timing.medians(timed, args, warm_up=WARM_UP, description="host")
    for candidate in made.values():
        del candidate.steps[: -args.repeat]
    return made


def bf16_for(candidate: str) -> str:
    """The name of bf16, compiled if the candidate is."""
    return BF16 + COMPILED * candidate.endswith(COMPILED)


def host_table(by_name: dict[str, Candidate], layers: int) -> str:
    """A line per candidate: CPU time of a step, also relative to bf16's, and of its parts."""
    lines = []
    for name, candidate in by_name.items():
        steps, cells = candidate.steps, [name]
        for figure in (statistics.median, min):
            mine, bf16 = figure(totals(steps)), figure(totals(by_name[bf16_for(name)].steps))
            cells += [milliseconds(mine), ratio(mine, bf16)]
        cells.append(f"{1e6 * statistics.median(totals(steps)) / layers:.0f}")
        parts = (statistics.median(step[part] for step in steps) for part in PARTS)
        guards = guards_of(candidate.model)
        lines.append([*cells, *map(milliseconds, parts), "" if guards is None else f"{guards:,}"])
    head = ["candidate", "CPU ms", "x bf16", "minimum", "x bf16", "us per linear layer", *PARTS]
    return table([*head, "guards"], lines, "lr")


def totals(steps: Sequence[Step]) -> list[float]:
    """The seconds of each step."""
    return [step.total() for step in steps]


def run(args: argparse.Namespace) -> int:
    with fake_world(args.ranks):
        mesh = init_device_mesh("cuda", (args.ranks, 1), mesh_dim_names=("dp", "tp"))
        by_name = measure(mesh, args)
    title = f"host, blocks: {args.blocks} x {args.dim}, ranks: {args.ranks}"
    title += f", micro-batches: {args.micro_batches}"
    if args.experts:
        title += f", experts: {args.experts} (torchao.float8 converts none)"
    return finish(args, {title: host_table(by_name, LINEAR * args.blocks)})
