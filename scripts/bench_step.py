"""Times a training step of the reference model beside bf16 and torchao, in one run.

    python scripts/bench_step.py --mesh dp=2 tp=2 dp=2,tp=2 --model debug small --assert 2 --write
    python scripts/bench_step.py --compile --assert 1 --write

A step is what follows the optimizer's step before (precompute, or the sync of delayed scales),
forward, backward and an AdamW step (fused). `--mesh` names FSDP2 ("dp") and tensor-parallel ("tp",
with sequence parallelism) axes, whose ranks this script starts on this machine, bound to cores;
"none" is one process. `--compile` compiles each transformer block. `--assert RATIO`: tensorwise has
RATIO times torchao's speed. The first command above takes 20 minutes on two cores.

Every candidate has the same work beside its linear layers. Attention is part of it: on CPUs in fp32
(`ATTENTION`), as at heads and sequences as short as these torch's backward of it in bf16 would be
most of a step. The smaller the batch, the more of a step is Python and the latency of collectives.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_models import AfterStep, build
from bench_peers import BF16, OURS, TORCHAO, faster_than_peer, peer_of
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
from llama import MODELS, Llama
from torch.distributed.device_mesh import init_device_mesh

Mesh = tuple[int, int]  # ranks of dp, tp
ABOUT = """\
A step of {batch_size} x {seq_len} tokens per data-parallel rank, medians of {repeat} turns of the
slowest rank; {blocks}. Ratios beside torchao are to the recipe of its own that is most alike;
bf16's, to tensorwise, is what could be reached if float8 cost nothing. Attention itself multiplies
in {attention}."""

# What attention multiplies on each type of device, if not what it is given.
ATTENTION = {"cpu": torch.float32}


class Trained:
    """A candidate's model with its optimizer; `step` trains on a batch."""

    def __init__(self, model: Llama, after: AfterStep) -> None:
        self.model, self.after = model, after
        for block in model.layers:
            block.attention.dtype = ATTENTION.get(model.cos.device.type)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        """What follows the step before, here so that its collective ends in a step; the step."""
        self.after(self.model)
        logits = self.model(tokens)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(
    mesh_sizes: Mesh, sizes: Sequence[str], names: Sequence[str], args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Median seconds of a step by model and candidate; called on every rank."""
    mesh = None
    if dist.is_initialized():
        mesh = init_device_mesh(args.device.type, mesh_sizes, mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(0 if mesh is None else mesh.get_local_rank("dp"))
    shape = args.batch_size, args.seq_len
    batch = [torch.randint(256, shape, generator=generator).to(args.device) for _ in range(2)]
    found = {}
    for size in sizes:
        trained = {
            name: Trained(*build(name, MODELS[size], mesh, args.device, args.compile))
            for name in names
        }
        timed = {name: Timed(partial(each.step, *batch)) for name, each in trained.items()}
        found[size] = medians(timed, args, warm_up=3, description=size)
    return found


@dataclasses.dataclass
class Run:
    """Median seconds of a step by candidate, for one model on one mesh."""

    model: str
    mesh: Mesh
    compiled: bool
    seconds: dict[str, float]

    @property
    def title(self) -> str:
        """Of the section."""
        compiled = ", compiled" if self.compiled else ""
        return f"A training step, {self.model} model, {mesh_text(self.mesh)}{compiled}"


def mesh_type(text: str) -> Mesh:
    """The type of `--mesh`: "none", or sizes of the axes as in "dp=2,tp=2"."""
    sizes = {"dp": 1, "tp": 1}
    for axis in [] if text == "none" else text.split(","):
        name, _, ranks = axis.partition("=")
        if name not in sizes or not ranks.isdecimal() or int(ranks) < 1:
            raise argparse.ArgumentTypeError(f"{text}: expected none, dp=N, tp=N or dp=N,tp=N")
        sizes[name] = int(ranks)
    return sizes["dp"], sizes["tp"]


def mesh_text(mesh: Mesh) -> str:
    """A mesh as people read it."""
    parts = [f"FSDP2 x{mesh[0]}"] * (mesh[0] > 1) + [f"TP x{mesh[1]} + SP"] * (mesh[1] > 1)
    return ", ".join(parts) or "one process"


def table(seconds: dict[str, float]) -> str:
    """Markdown: a row per candidate, as a multiple of bf16 and of torchao's like recipe."""
    lines = [["candidate", "ms", "x bf16", "faster than torchao"]]
    for name, median in seconds.items():
        faster = faster_than_peer(name, seconds)
        shown = "" if faster is None else f"{faster:.2f}x"
        lines.append([name, milliseconds(median), ratio(median, seconds[BF16]), shown])
    return markdown(lines)


def checks(runs: Sequence[Run], least: float | None) -> list[Check]:
    """What `--assert` asks: tensorwise against torchao's."""
    found = []
    for run in runs if least is not None else ():
        faster = faster_than_peer("tensorwise", run.seconds)
        if faster is None:
            found.append(Check(f"{run.title}: torchao is installed", False))
            continue
        sentence = f"tensorwise {faster:.2f}x faster than torchao, at least {least:g}"
        found.append(Check(f"{run.title}: {sentence}", faster >= least))
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = make_parser(__doc__, repeat=7)
    add = parser.add_argument
    add("--model", choices=MODELS, nargs="+", default=["debug"], help="default: debug")
    add("--mesh", type=mesh_type, nargs="+", default=[(1, 1)], help="default: none")
    add("--recipes", choices=OURS, nargs="+", default=OURS, help="ours; default: all")
    add("--batch-size", type=positive, default=64, help="rows per rank of dp; %(default)s")
    add("--seq-len", type=positive, default=128, help="tokens per row; %(default)s")
    add("--compile", action="store_true", help="torch.compile each block")
    add(
        "--assert",
        dest="least",
        type=float,
        metavar="RATIO",
        help="fail unless tensorwise is faster than torchao's by this on each mesh",
    )
    args = start(parser, argv)
    for mesh in args.mesh:
        if args.compile and math.prod(mesh) > 1:
            parser.error("--compile is for --mesh none: torchao's layers don't compile with TP")
    args.asserted = args.least is not None
    if args.asserted and "tensorwise" not in args.recipes:
        parser.error("--assert is about tensorwise: --recipes must have it")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(argv)
    wanted = {peer_of(name) for name in args.recipes}
    names = [BF16, *args.recipes, *(name for name in TORCHAO if name in wanted)]
    runs = []
    for mesh in args.mesh:
        task = (mesh, args.model, names, args)
        ranks = math.prod(mesh)
        by_model = measure(*task) if ranks == 1 else run_on_ranks(ranks, args, measure, *task)
        if by_model is None:
            return 0  # rank 0 of a torchrun reports
        runs += [Run(model, mesh, args.compile, by_model[model]) for model in args.model]
    about = ABOUT.format(
        **vars(args),
        blocks="compiled blocks" if args.compile else "eager",
        attention="fp32" if args.device.type in ATTENTION else "bf16",
    )
    sections = {}
    for run in runs:
        sections[run.title] = section(args, about, table(run.seconds))
    report = Report(PAGE, sections)
    report.data = [dataclasses.asdict(run) for run in runs]
    report.checks = checks(runs, args.least)
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(main())
