"""The steps of `scripts.bench.host`."""

import argparse
import gc
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scripts.bench import timing
from scripts.bench.host import COMPILED
from scripts.bench.timing import Timed, milliseconds, ratio
from scripts.common.llama import LlamaConfig
from scripts.common.markdown import table
from scripts.common.models import after_step, build
from scripts.common.recipes import BF16
from scripts.common.report import finish
from scripts.common.sizes import Mixture
from scripts.plan.world import fake_world

PARTS = ("update", "forward", "backward", "optimizer")
LINEAR = 7  # layers in a block; with experts three of them are grouped
TOKENS, VOCABULARY, HEADS, TOP_K, WARM_UP = 1024, 1024, 16, 2, 3
Step = Counter[str]  # seconds by part


def step_of(
    candidate: str, mesh: DeviceMesh, args: argparse.Namespace
) -> tuple[Callable[[], None], list[Step]]:
    """A candidate's step, and a list to which each run adds its seconds."""
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

    return step, steps


def measure(mesh: DeviceMesh, args: argparse.Namespace) -> dict[str, list[Step]]:
    """The timed steps of each candidate, and of the bf16 to compare it with."""
    names = dict.fromkeys([*map(bf16_for, args.candidates), *args.candidates])
    made = {name: step_of(name, mesh, args) for name in names}
    for step, _ in made.values():
        step()  # compiles
    # Collect garbage between steps, and only that of steps.
    gc.disable()
    gc.collect()
    gc.freeze()
    timed = {name: Timed(step, gc.collect) for name, (step, _) in made.items()}
    timing.medians(timed, args, warm_up=WARM_UP, description="host")
    return {name: steps[-args.repeat :] for name, (_, steps) in made.items()}


def bf16_for(candidate: str) -> str:
    """The name of bf16, compiled if the candidate is."""
    return BF16 + COMPILED * candidate.endswith(COMPILED)


def host_table(by_name: dict[str, list[Step]], layers: int) -> str:
    """A line per candidate: CPU time of a step, also relative to bf16's, and of its parts."""
    lines = []
    for name, steps in by_name.items():
        cells = [name]
        for figure in (statistics.median, min):
            mine, bf16 = figure(totals(steps)), figure(totals(by_name[bf16_for(name)]))
            cells += [milliseconds(mine), ratio(mine, bf16)]
        cells.append(f"{1e6 * statistics.median(totals(steps)) / layers:.0f}")
        parts = (statistics.median(step[part] for step in steps) for part in PARTS)
        lines.append([*cells, *map(milliseconds, parts)])
    head = ["candidate", "CPU ms", "x bf16", "minimum", "x bf16", "us per linear layer", *PARTS]
    return table(head, lines, "lr")


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
