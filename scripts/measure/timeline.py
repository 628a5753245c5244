"""Shows which collectives of a training step are issued before work that does not need them.

    python -m scripts.measure.timeline --assert

Starts two ranks (gloo, CPU) that train a Llama under FSDP2 with float8 gathers, traces a step with
torch.profiler on rank 0, and reads the order of the main thread's events. The order does not
depend on the machine. The step begins where the gradients of the last one are complete: optimizer,
precompute, the next batch, forward, backward.

A collective is *issued* by a ``c10d::`` operator. Its result is *used* where FSDP2 copies it out of
a gather, or where ``wait_tensor`` waits for the all-reduce of precompute. FSDP2 waits for a
reduce-scatter where it issues it.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile, record_function

from fp8_dist import update_float8_scales
from scripts.common.llama import MODELS, LlamaConfig
from scripts.common.markdown import table
from scripts.common.models import build
from scripts.common.ranks import run_on_ranks
from scripts.common.report import Check, finish, make_parser, start

MODEL, RANKS, RECIPE = MODELS["small"], 2, "tensorwise"
BATCH_SIZE, SEQ_LEN = 2, 64  # of each rank
STEP, PRECOMPUTE, FORWARD = "step", "precompute", "forward"  # ranges of the trace
FLOAT8_WEIGHTS = "weight all-gather, float8"
OTHER_WEIGHTS = "weight all-gather, bf16"
GRADIENTS = "gradient reduce-scatter"
PRECOMPUTED = "amax all-reduce of precompute"
KINDS = (PRECOMPUTED, FLOAT8_WEIGHTS, OTHER_WEIGHTS, GRADIENTS)
WAIT = "_c10d_functional::wait_tensor"
GATHER, COPY_OUT = "FSDP::all_gather", "FSDP::all_gather_copy_out"


def make_step(sizes: LlamaConfig, mesh: DeviceMesh) -> Callable[[], None]:
    """A training step whose parts are ranges of the trace. (The first one has no gradients yet.)

    gloo's collectives run on threads of its own, but unless told otherwise FSDP2 waits for each
    gather where it begins it. That costs nothing on GPUs, where only a stream waits.
    """
    model = build(RECIPE, sizes, mesh)
    assert isinstance(model, FSDPModule), "the mesh has no FSDP2 axis"
    model._set_unshard_async_op(True)
    for unit, following in pairwise([model, *model.layers]):
        unit.set_modules_to_forward_prefetch([following])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    seq_len = min(SEQ_LEN, sizes.max_seq_len)

    def step() -> None:
        with record_function(STEP):
            optimizer.step()
            optimizer.zero_grad()
            with record_function(PRECOMPUTE):
                update_float8_scales(model)
            tokens = torch.randint(sizes.vocab_size, (BATCH_SIZE, seq_len))
            with record_function(FORWARD):
                loss = model(tokens).logsumexp(-1).mean()
            loss.backward()

    return step


def traced_step(sizes: LlamaConfig) -> list[dict[str, Any]]:
    """Trains three steps on every rank; returns the third one's spans, of Chrome's JSON."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    step = make_step(sizes, mesh)
    step()
    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


class Span(NamedTuple):
    """An event of the main thread; times are microseconds since the step began.

    `dtype` is that of the tensor that a collective, or a wait, is about.
    """

    name: str
    begin: float
    end: float
    dtype: str = ""

    def contains(self, other: "Span") -> bool:
        """Whether the other one lasted within this one."""
        return self.begin <= other.begin and other.end <= self.end


class Collective(NamedTuple):
    """A collective: its kind, the operator that issued it, the innermost range around that."""

    kind: str
    issued: Span
    within: Span


@dataclass
class Timeline:
    """The main thread's events in one step, in order."""

    ranges: list[Span] = field(default_factory=list)
    operators: list[Span] = field(default_factory=list)

    def range(self, name: str) -> Span:
        """The first range of a name."""
        return next(span for span in self.ranges if span.name == name)

    def around(self, span: Span) -> Span:
        """The innermost range around an operator."""
        return [each for each in self.ranges if each.contains(span)][-1]

    def collectives(self) -> list[Collective]:
        """All collectives, in the order of their issue."""
        issued = [span for span in self.operators if span.name.startswith("c10d::")]
        found = [(span, self.around(span)) for span in issued]
        return [Collective(_kind(span, within), span, within) for span, within in found]

    def waits_for_precompute(self) -> list[Span]:
        """Where the main thread waits for the bits of amaxes, which are int32."""
        return [span for span in self.operators if (span.name, span.dtype) == (WAIT, "int")]

    def hidden(self, collective: Collective) -> bool:
        """Whether other operators run between the issue of a collective and the first use."""
        end = collective.within.end
        if collective.kind == PRECOMPUTED:
            uses = self.waits_for_precompute()
        elif collective.within.name.startswith(GATHER):
            name = collective.within.name.replace(GATHER, COPY_OUT)
            uses = [span for span in self.ranges if span.name == name]
        else:
            return False
        use = min((span.begin for span in uses if span.begin >= end), default=end)
        return any(
            end <= span.begin < use and not self.around(span).name.startswith("FSDP::")
            for span in self.operators
        )


def _kind(issued: Span, within: Span) -> str:
    if within.name == PRECOMPUTE:
        return PRECOMPUTED
    if issued.name.startswith("c10d::_reduce_scatter"):
        return GRADIENTS
    return FLOAT8_WEIGHTS if issued.dtype == "unsigned char" else OTHER_WEIGHTS


def read(events: Sequence[dict[str, Any]]) -> Timeline:
    """The main thread's part of a trace's events."""
    (step,) = (event for event in events if event["name"] == STEP)
    end = step["ts"] + step["dur"]
    found = Timeline()
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["tid"] == step["tid"] and step["ts"] <= event["ts"] < end:
            begin, types = event["ts"] - step["ts"], event.get("args", {}).get("Input type")
            # Operators of c10d that have an output take it first, in the same dtype.
            span = Span(event["name"], begin, begin + event["dur"], types[0] if types else "")
            in_range = event["cat"] == "user_annotation"
            (found.ranges if in_range else found.operators).append(span)
    return found


def collectives_table(timeline: Timeline) -> str:
    """For each kind of collective: how many there are, and how many are issued before work."""
    lines = []
    for kind in KINDS:
        found = [each for each in timeline.collectives() if each.kind == kind]
        lines.append([kind, str(len(found)), str(sum(map(timeline.hidden, found)))])
    return table(["collective", "count", "with work before its result is used"], lines, "lr")


def checks(timeline: Timeline) -> list[Check]:
    """What is said of precompute's all-reduce and of gathers, in the order of the events."""
    call, waits = timeline.range(PRECOMPUTE), timeline.waits_for_precompute()
    found = timeline.collectives()
    gathers = [each for each in found if each.kind == FLOAT8_WEIGHTS]
    reductions = [each for each in found if each.kind == PRECOMPUTED]
    in_call = [span for span in timeline.operators if span.name == WAIT and call.contains(span)]
    first_use = [
        wait
        for wait in waits
        if gathers[0].within.contains(wait) and wait.end <= gathers[0].issued.begin
    ]
    in_forward = [timeline.range(FORWARD).contains(wait) for wait in waits]
    first, cast = "the wait is where the first float8 weights are cast", "just before their gather"
    gather = "every float8 gather is issued before work that does not need it"
    return [
        Check("precompute issues one all-reduce before it returns", len(reductions) == 1),
        Check("precompute waits for nothing", not in_call),
        Check("its result is waited for once, in forward", in_forward == [True]),
        Check(f"{first}, {cast}", len(first_use) == 1),
        Check(gather, bool(gathers) and all(map(timeline.hidden, gathers))),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    asserts = "the order is another one"
    parser = make_parser("scripts.measure.timeline", __doc__, asserts=asserts)
    args = start(parser, argv)
    timeline = read(run_on_ranks(RANKS, traced_step, MODEL, threads=args.threads)[0])
    blocks = {"timeline": collectives_table(timeline)}
    return finish(args, blocks, checks(timeline))


if __name__ == "__main__":
    sys.exit(main())
