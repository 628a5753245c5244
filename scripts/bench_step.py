"""Times a training step of the reference model beside bf16 and torchao, in one run.

    python scripts/bench_step.py --mesh dp=2 tp=2 dp=2,tp=2 --model debug small --assert 2 --write
    python scripts/bench_step.py --compile --assert 1 --write

A step is what follows the optimizer's step before (precompute, or the sync of delayed scales),
forward, backward and an AdamW step (fused). `--mesh` names FSDP2 ("dp") and tensor-parallel ("tp",
with sequence parallelism) axes, whose ranks this script starts on this machine, bound to cores;
"none" is one process. `--compile` compiles each transformer block.

`--assert RATIO` is about tensorwise: RATIO times torchao's speed. Where bf16's own step, with the
all-reduces that global scales need, is not even that and a tenth faster than torchao's, no float8
step can be: there it must add at most half of the time that torchao's adds to that.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_models import AfterStep, build
from bench_peers import BF16, FLOOR, OURS, TORCHAO, added_of_peer, faster_than_peer, peer_of
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fp8_dist.debug import comm_audit
from fp8_dist.sharding import all_reduce_max

Mesh = tuple[int, int]  # ranks of dp, tp
ABOUT = """\
A step of a batch of {batch_size} x {seq_len} tokens, medians of {repeat} turns of the slowest rank;
{blocks}. Ratios beside torchao are to the recipe of its own that is most alike; bf16's, to
tensorwise, is what could be reached if float8 cost nothing. "added": the time that a recipe adds to
bf16's, as a part of what torchao's adds."""
ABOUT_FLOOR = """
"bf16 + amax": bf16's step and, after it, the all-reduces of 4 bytes in which tensorwise exchanges
the amaxes of inputs and gradients: about the least that global scales cost."""
# The least that casting is taken to add to that (or to bf16's step, without tensor parallelism), in
# judging whether a target can be reached; and what is asked where it can't.
CASTING, MOST_ADDED = 0.1, 0.5


class Trained:
    """A candidate's model with its optimizer; `step` trains on a batch."""

    def __init__(self, model: Llama, after: AfterStep) -> None:
        self.model, self.after = model, after
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
    shape = args.batch_size // mesh_sizes[0], args.seq_len
    batch = [torch.randint(256, shape, generator=generator).to(args.device) for _ in range(2)]
    found = {}
    for size in sizes:
        trained = {
            name: Trained(*build(name, MODELS[size], mesh, args.device, args.compile))
            for name in names
        }
        timed = {name: Timed(partial(each.step, *batch)) for name, each in trained.items()}
        if mesh is not None and mesh["tp"].size() > 1 and "tensorwise" in names:
            count = amaxes_of(partial(trained["tensorwise"].step, *batch), mesh)
            floor = partial(step_with_amaxes, partial(trained[BF16].step, *batch), count, mesh)
            timed = {BF16: timed[BF16], FLOOR: Timed(floor)} | timed
        found[size] = medians(timed, args, warm_up=3, description=size)
    return found


def amaxes_of(step: Callable[[], None], mesh: DeviceMesh) -> int:
    """How many all-reduces over the axis "tp" a step makes for single numbers."""
    with comm_audit(mesh) as audit:
        step()
    rows = [row for row in audit.rows if (row.op, row.axis) == ("all_reduce", "tp")]
    return sum(row.count for row in rows if row.elements == row.count)


def step_with_amaxes(step: Callable[[], None], count: int, mesh: DeviceMesh) -> None:
    """A step, and that many all-reduces of an amax over the axis "tp"."""
    step()
    amax, group = torch.zeros((), device=mesh.device_type), mesh.get_group("tp").group_name
    for _ in range(count):
        all_reduce_max(amax, group)


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
    lines = [["candidate", "ms", "x bf16", "faster than torchao", "added"]]
    for name, median in seconds.items():
        faster, added = faster_than_peer(name, seconds), added_of_peer(name, seconds)
        shown = [
            "" if faster is None else f"{faster:.2f}x",
            "" if added is None else f"{added:.0%}",
        ]
        lines.append([name, milliseconds(median), ratio(median, seconds[BF16]), *shown])
    return markdown(lines)


def checks(runs: Sequence[Run], least: float | None) -> list[Check]:
    """What `--assert` asks: tensorwise against torchao's."""
    found = []
    for run in runs if least is not None else ():
        faster = faster_than_peer("tensorwise", run.seconds)
        bound = FLOOR if FLOOR in run.seconds else BF16
        limit = faster_than_peer(bound, run.seconds)
        if faster is None or limit is None:
            found.append(Check(f"{run.title}: torchao is installed", False))
            continue
        sentence = f"{run.title}: tensorwise {faster:.2f}x faster than torchao, "
        if faster >= least or limit >= least * (1 + CASTING):
            found.append(Check(f"{sentence}at least {least:g}", faster >= least))
            continue
        sentence += f"{least:g} is out of reach ({bound} {limit:.2f}x): "
        ours, theirs = (
            run.seconds[name] - run.seconds[bound]
            for name in ("tensorwise", str(peer_of("tensorwise")))
        )
        if theirs <= 0:
            found.append(Check(f"{sentence}torchao adds nothing to it", False))
        else:
            part = ours / theirs
            sentence += f"adds {part:.0%} of what torchao adds to that, at most {MOST_ADDED:.0%}"
            found.append(Check(sentence, part <= MOST_ADDED))
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = make_parser(__doc__, repeat=15)
    add = parser.add_argument
    add("--model", choices=MODELS, nargs="+", default=["debug"], help="default: debug")
    add("--mesh", type=mesh_type, nargs="+", default=[(1, 1)], help="default: none")
    add("--recipes", choices=OURS, nargs="+", default=OURS, help="ours; default: all")
    add("--batch-size", type=positive, default=8, help="rows of the global batch; %(default)s")
    add("--seq-len", type=positive, default=128, help="tokens per row; %(default)s")
    add("--compile", action="store_true", help="torch.compile each block")
    add(
        "--assert",
        dest="least",
        type=float,
        metavar="RATIO",
        help="fail unless tensorwise is faster than torchao's by this on each mesh; where bf16 "
        "itself is hardly, unless it adds at most half of the time that torchao's adds to that",
    )
    args = start(parser, argv)
    for mesh in args.mesh:
        if args.batch_size % mesh[0]:
            parser.error(f"--batch-size {args.batch_size} is no multiple of dp={mesh[0]}")
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
    about = ABOUT.format(**vars(args), blocks="compiled blocks" if args.compile else "eager")
    sections = {}
    for run in runs:
        more = ABOUT_FLOOR if FLOOR in run.seconds else ""
        sections[run.title] = section(args, about + more, table(run.seconds))
    report = Report(PAGE, sections)
    report.data = [dataclasses.asdict(run) for run in runs]
    report.checks = checks(runs, args.least)
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(main())
