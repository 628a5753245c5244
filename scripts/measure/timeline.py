"""Shows which collectives of a training step are issued before work that does not need them.

    python -m scripts.measure.timeline --assert --write

Starts two ranks (gloo, CPU) that train a Llama under FSDP2 with float8 gathers, traces a step with
torch.profiler on rank 0, and reads the order of the main thread's events. The order does not
depend on the machine.

A collective is *issued* by a ``c10d::`` operator. Its result is *used* where FSDP2 copies it out of
a gather, or where ``wait_tensor`` waits for the all-reduce of precompute. FSDP2 waits for a
reduce-scatter where it issues it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from scripts.common.llama import MODELS
from scripts.common.markdown import table
from scripts.common.ranks import run_on_ranks
from scripts.common.report import Check, finish, make_parser, start
from scripts.measure.traced_step import FORWARD, PRECOMPUTE, STEP, traced_step

MODEL, RANKS = MODELS["small"], 2
FLOAT8_WEIGHTS = "weight all-gather, float8"
OTHER_WEIGHTS = "weight all-gather, bf16"
GRADIENTS = "gradient reduce-scatter"
PRECOMPUTED = "amax all-reduce of precompute"
KINDS = (PRECOMPUTED, FLOAT8_WEIGHTS, OTHER_WEIGHTS, GRADIENTS)
WAIT = "_c10d_functional::wait_tensor"
GATHER, COPY_OUT = "FSDP::all_gather", "FSDP::all_gather_copy_out"


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
        if event["tid"] == step["tid"] and step["ts"] <= event["ts"] < end and event is not step:
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
    parser = make_parser("scripts.measure.timeline", __doc__, "timeline.md", asserts=asserts)
    trace_help = "keep the trace there, for Perfetto"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=trace_help)
    args = start(parser, argv)
    trace = args.trace and args.trace.absolute()
    timeline = read(run_on_ranks(RANKS, traced_step, MODEL, trace, threads=args.threads)[0])
    blocks = {"timeline": collectives_table(timeline)}
    return finish(args, blocks, checks(timeline))


if __name__ == "__main__":
    sys.exit(main())
