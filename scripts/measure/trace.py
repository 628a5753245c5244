"""Reads what a step's trace says: phases, blocks, collectives, and where the main thread waits.

All times are milliseconds since the step began. A collective is *under way* while gloo's own range
lasts: from when a thread of gloo begins to work at it until it is done. It is *issued* by the
``c10d::`` operator of the main thread.

The main thread *waits* in ``wait_tensor``, and, where FSDP2 waits in Python for a collective, from
the end of the operator that issued it, or from the beginning of the copy out of its result, until
the next operator or the end of FSDP2's range. The Python code in these gaps counts as waiting, so
that what is said to overlap is a lower bound.
"""

import json
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timeline_step import BACKWARD, FORWARD, PHASES, PRECOMPUTE, step_of

FLOAT8_WEIGHTS = "weight all-gather, float8"
OTHER_WEIGHTS = "weight all-gather, bf16"
GRADIENTS = "gradient reduce-scatter"
PRECOMPUTED = "amax all-reduce of precompute"
# Of tensor parallelism: activations, and their gradients; amaxes of those; the norms' gradients.
TP_GATHER, TP_SCATTER = "TP all-gather", "TP reduce-scatter"
TP_AMAX, TP_REDUCE = "TP amax all-reduce", "TP all-reduce"
KINDS = (
    PRECOMPUTED,
    FLOAT8_WEIGHTS,
    OTHER_WEIGHTS,
    GRADIENTS,
    TP_GATHER,
    TP_SCATTER,
    TP_AMAX,
    TP_REDUCE,
)
# What operators that issue are called, and gloo's ranges: it reduce-scatters by an all-reduce.
OPS = {
    "allgather": ("all_gather", "gloo:all_gather"),
    "reduce_scatter": ("reduce_scatter", "gloo:all_reduce"),
    "allreduce": ("all_reduce", "gloo:all_reduce"),
}
# FSDP2's ranges in which it may wait for what it issues.
ISSUING = ("FSDP::all_gather", "FSDP::post_backward_reduce")
COPY_OUT = "FSDP::all_gather_copy_out"
WAIT = "_c10d_functional::wait_tensor"
# Which ranges a block's forward and backward begin and end with.
BLOCK_RANGES = {
    FORWARD: ("FSDP::pre_forward", "FSDP::post_forward"),
    BACKWARD: ("FSDP::pre_backward", "FSDP::post_backward_reduce"),
}


@dataclass(frozen=True)
class Span:
    """Something that lasted; `dims` and `dtype` are those of the tensor that is communicated."""

    name: str
    begin: float
    end: float
    dims: tuple[int, ...] = ()
    dtype: str = ""

    @property
    def duration(self) -> float:
        return self.end - self.begin

    def contains(self, other: "Span") -> bool:
        return self.begin <= other.begin and other.end <= self.end

    def shared(self, other: "Span") -> float:
        """How long both last."""
        return max(0.0, min(self.end, other.end) - max(self.begin, other.begin))


@dataclass(frozen=True)
class Collective:
    """One collective: its kind, the operator that issued it, the range around that, gloo's own."""

    kind: str
    issued: Span
    within: Span
    under_way: Span

    @property
    def block(self) -> str:
        """Whose weights or gradients these are; "" where it isn't told."""
        return block_of(self.within.name)


@dataclass(frozen=True)
class Timeline:
    """What is read from a trace.

    Attributes:
        phases: of the step, in order.
        blocks: by "forward" and "backward": a span for each block, its name that of the block.
        collectives: in the order of their issue.
        waits: of the main thread, in order; they don't overlap.
        precompute_waits: those for the result of precompute's all-reduce, with the ranges around.
    """

    phases: list[Span]
    blocks: dict[str, list[Span]]
    collectives: list[Collective]
    waits: list[Span]
    precompute_waits: list[tuple[Span, Span]]

    def of(self, kind: str) -> list[Collective]:
        """The collectives of a kind."""
        return [c for c in self.collectives if c.kind == kind]

    def phase(self, name: str) -> Span:
        """A phase by its name."""
        (found,) = (phase for phase in self.phases if phase.name == name)
        return found

    def overlapped(self, collective: Collective) -> float:
        """Milliseconds of a collective in which the main thread neither waited nor issued it."""
        span = collective.under_way
        return span.duration - sum(map(span.shared, [collective.issued, *self.waits]))


def block_of(name: str) -> str:
    """The module that a range of FSDP2 names in parentheses; "" for the root."""
    return name.partition("(")[2].partition(")")[0]


def read(path: Path) -> Timeline:
    """Reads a trace that `timeline_step.trace_step` wrote.

    Raises:
        ValueError: a collective of the main thread has no range of gloo's, or the other way round.
    """
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    step = step_of(events)
    spans = {id(e): _span(e, step["ts"]) for e in events}
    main = [e for e in events if e["tid"] == step["tid"] and e is not step]
    ranges = [spans[id(e)] for e in main if e["cat"] == "user_annotation"]
    ranges.sort(key=lambda span: (span.begin, -span.end))
    ops = [spans[id(e)] for e in main if e["cat"] != "user_annotation"]
    gloo = [spans[id(e)] for e in events if e["name"].startswith("gloo:")]
    collectives = list(_collectives(ops, gloo, ranges))
    return Timeline(
        [span for span in ranges if span.name in PHASES],
        {way: list(_blocks(ranges, *names)) for way, names in BLOCK_RANGES.items()},
        collectives,
        list(_waits(ops, ranges)),
        list(_waits_for_precompute(ops, ranges, collectives)),
    )


def _span(event: dict[str, Any], origin: float) -> Span:
    begin = (event["ts"] - origin) / 1e3
    dims, dtype = event["args"].get("Input Dims"), event["args"].get("Input type")
    name = event["name"]
    # c10d:: operators that have an output take it before the input.
    at = 1 if name.startswith("c10d::") and not name.startswith("c10d::allreduce") else 0
    shape, kind = (dims[at], dtype[at]) if dims else ((), "")
    if kind == "TensorList":
        (shape,) = shape
    return Span(name, begin, begin + event["dur"] / 1e3, tuple(shape), kind)


def _collectives(ops: list[Span], gloo: list[Span], ranges: list[Span]) -> Iterator[Collective]:
    """Pairs issues with ranges of gloo's that work at tensors of that shape, first come first."""
    left = sorted(gloo, key=lambda span: span.begin)
    for issue in sorted(ops, key=lambda span: span.begin):
        op, name = _communicates(issue.name)
        if not op:
            continue
        same = (s for s in left if (s.name, s.dims) == (name, issue.dims) and s.end > issue.begin)
        span = next(same, None)
        if span is None:
            raise ValueError(f"the trace has no {name} for the {issue.name} of {issue.dims}")
        left.remove(span)
        within = _innermost(ranges, issue)
        yield Collective(_kind(op, span.dtype, within.name), issue, within, span)
    if left:
        raise ValueError(f"the main thread did not issue {left[0].name} of {left[0].dims}")


def _communicates(name: str) -> tuple[str, str]:
    """What a c10d operator issues, and gloo's name of it; empty for others."""
    operator = name.removeprefix("c10d::").lstrip("_")
    found = (names for prefix, names in OPS.items() if operator.startswith(prefix))
    return next(found, ("", "")) if name.startswith("c10d::") else ("", "")


def _kind(op: str, dtype: str, within: str) -> str:
    if within == PRECOMPUTE:
        return PRECOMPUTED
    of_fsdp = within.startswith("FSDP::")
    if op == "all_gather":
        if not of_fsdp:
            return TP_GATHER
        # float8 travels as bytes.
        return FLOAT8_WEIGHTS if dtype == "unsigned char" else OTHER_WEIGHTS
    if op == "reduce_scatter":
        return GRADIENTS if of_fsdp else TP_SCATTER
    return TP_AMAX if dtype == "int" else TP_REDUCE


def _innermost(ranges: list[Span], span: Span) -> Span:
    """The last range to begin of those around a span."""
    return [r for r in ranges if r.contains(span)][-1]


def _blocks(ranges: list[Span], first: str, last: str) -> Iterator[Span]:
    """From the beginning of a block's first range to the end of its last one."""
    ends = {block_of(r.name): r.end for r in ranges if r.name.partition(" ")[0] == last}
    for span in ranges:
        name, block = span.name.partition(" ")[0], block_of(span.name)
        if name == first and block:
            yield Span(block, span.begin, ends[block])


def _waits(ops: list[Span], ranges: list[Span]) -> Iterator[Span]:
    """See the file."""
    begins = sorted(span.begin for span in [*ops, *ranges])

    def until_next(begin: float, within: Span) -> Span:
        after = begins[bisect_left(begins, begin) :]
        return Span("in Python", begin, min([within.end, *after[:1]]))

    found = [op for op in ops if op.name == WAIT]
    for op in ops:
        if op.name.startswith("c10d::"):
            within = _innermost(ranges, op)
            if within.name.partition(" ")[0] in ISSUING:
                found.append(until_next(op.end, within))
    for span in ranges:
        if span.name.partition(" ")[0] == COPY_OUT:
            # Not its own beginning.
            found.append(until_next(span.begin + 1e-6, span))
    end = 0.0
    for wait in sorted(found, key=lambda span: span.begin):
        # A tensor subclass waits within its own wait: the outer one is told.
        if wait.begin >= end:
            yield wait
            end = wait.end


def _waits_for_precompute(
    ops: list[Span], ranges: list[Span], collectives: list[Collective]
) -> Iterator[tuple[Span, Span]]:
    for collective in collectives:
        if collective.kind != PRECOMPUTED:
            continue
        reduced = collective.under_way
        for op in ops:
            same = (op.name, op.dims, op.dtype) == (WAIT, reduced.dims, reduced.dtype)
            if same and op.begin >= collective.issued.begin:
                yield op, _innermost(ranges, op)
