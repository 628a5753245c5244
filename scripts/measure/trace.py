"""Reads a step's trace: its phases, its collectives, and where the main thread waits.

All times are milliseconds since the step began. A collective is *issued* by a ``c10d::`` operator
of the main thread. It is *under way* while gloo's own range lasts: from when a thread of gloo
begins to work at it until it is done.

The main thread *waits* in ``wait_tensor``. Where FSDP2 waits for a collective in Python, the gap
until the next operator counts as waiting: from the end of the operator that issued the collective,
or from the beginning of the copy out of its result. That makes the overlap a lower bound.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from scripts.measure.traced_step import PHASES, PRECOMPUTE, STEP

FLOAT8_WEIGHTS = "weight all-gather, float8"
OTHER_WEIGHTS = "weight all-gather, bf16"
GRADIENTS = "gradient reduce-scatter"
PRECOMPUTED = "amax all-reduce of precompute"
# Of tensor parallelism: activations, and their gradients; amaxes of those; the norms' gradients.
TP_GATHER, TP_SCATTER = "TP all-gather", "TP reduce-scatter"
TP_AMAX, TP_REDUCE = "TP amax all-reduce", "TP all-reduce"
FSDP_KINDS = (PRECOMPUTED, FLOAT8_WEIGHTS, OTHER_WEIGHTS, GRADIENTS)
KINDS = (*FSDP_KINDS, TP_GATHER, TP_SCATTER, TP_AMAX, TP_REDUCE)
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


class Span(NamedTuple):
    """Something that lasted; `dims` and `dtype` are those of the tensor that is communicated."""

    name: str
    begin: float
    end: float
    dims: tuple[int, ...] = ()
    dtype: str = ""

    def contains(self, other: "Span") -> bool:
        """Whether the other one lasted within this one."""
        return self.begin <= other.begin and other.end <= self.end

    def shared(self, other: "Span") -> float:
        """How long both last."""
        return max(0.0, min(self.end, other.end) - max(self.begin, other.begin))


class Collective(NamedTuple):
    """One collective: its kind, the operator that issued it, the range around that, gloo's own."""

    kind: str
    issued: Span
    within: Span
    under_way: Span


@dataclass(frozen=True)
class Timeline:
    """What is read from a trace.

    Attributes:
        phases: of the step, by name.
        collectives: in the order of their issue.
        waits: of the main thread, in order; they don't overlap.
        precompute_waits: those for the result of precompute's all-reduce, with the ranges around.
    """

    phases: dict[str, Span]
    collectives: list[Collective]
    waits: list[Span]
    precompute_waits: list[tuple[Span, Span]]

    def of(self, kind: str) -> list[Collective]:
        """The collectives of a kind."""
        return [c for c in self.collectives if c.kind == kind]

    def overlapped(self, collective: Collective) -> float:
        """Milliseconds of a collective in which the main thread neither waited nor issued it."""
        span = collective.under_way
        return span.end - span.begin - sum(map(span.shared, [collective.issued, *self.waits]))


def read(events: list[dict[str, Any]]) -> Timeline:
    """Reads the events of a trace.

    Raises:
        ValueError: a collective of the main thread has no range of gloo's, or the other way round.
    """
    (step,) = (e for e in events if e["name"] == STEP)
    during = [e for e in events if step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
    main = [e for e in during if e["tid"] == step["tid"] and e is not step]
    ranges = [_span(e, step["ts"]) for e in main if e["cat"] == "user_annotation"]
    ranges.sort(key=lambda span: (span.begin, -span.end))
    ops = [_span(e, step["ts"]) for e in main if e["cat"] != "user_annotation"]
    ops.sort(key=lambda span: span.begin)
    gloo = [_span(e, step["ts"]) for e in during if e["name"].startswith("gloo:")]
    collectives = list(_collectives(ops, gloo, ranges))
    return Timeline(
        {span.name: span for span in ranges if span.name in PHASES},
        collectives,
        list(_waits(ops, ranges)),
        list(_waits_for_precompute(ops, ranges, collectives)),
    )


def _span(event: dict[str, Any], origin: float) -> Span:
    begin = (event["ts"] - origin) / 1e3
    name = event["name"]
    arguments = event.get("args", {})
    dims, dtype = arguments.get("Input Dims"), arguments.get("Input type")
    # c10d:: operators that have an output take it before the input.
    at = 1 if name.startswith("c10d::") and not name.startswith("c10d::allreduce") else 0
    communicates = any(word in name for word in ("c10d", "gloo"))
    shape, kind = (dims[at], dtype[at]) if communicates and dims else ((), "")
    if kind == "TensorList":
        (shape,) = shape
    return Span(name, begin, begin + event["dur"] / 1e3, tuple(shape), kind)


def _collectives(ops: list[Span], gloo: list[Span], ranges: list[Span]) -> Iterator[Collective]:
    """Pairs issues with ranges of gloo's that work at tensors of that shape, first come first."""
    left = sorted(gloo, key=lambda span: span.begin)
    for issue in ops:
        operator = issue.name.removeprefix("c10d::").lstrip("_")
        found = (names for prefix, names in OPS.items() if operator.startswith(prefix))
        op, name = next(found, ("", "")) if issue.name.startswith("c10d::") else ("", "")
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


def _kind(op: str, dtype: str, within: str) -> str:
    if within == PRECOMPUTE:
        return PRECOMPUTED
    of_fsdp = within.startswith("FSDP::")
    if op == "all_gather":
        weights = FLOAT8_WEIGHTS if dtype == "unsigned char" else OTHER_WEIGHTS
        return weights if of_fsdp else TP_GATHER
    if op == "reduce_scatter":
        return GRADIENTS if of_fsdp else TP_SCATTER
    return TP_AMAX if dtype == "int" else TP_REDUCE


def _innermost(ranges: list[Span], span: Span) -> Span:
    """The last range to begin of those around a span."""
    return [r for r in ranges if r.contains(span)][-1]


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
            found.append(until_next(span.begin + 1e-6, span))  # not its own beginning
    end = 0.0
    for wait in sorted(found, key=lambda span: span.begin):
        if wait.begin >= end:  # a tensor subclass waits within its own wait
            yield wait
            end = wait.end


def _waits_for_precompute(
    ops: list[Span], ranges: list[Span], collectives: list[Collective]
) -> Iterator[tuple[Span, Span]]:
    for collective in collectives:
        if collective.kind == PRECOMPUTED:
            reduced = collective.under_way
            for op in ops:
                same = (op.name, op.dims, op.dtype) == (WAIT, reduced.dims, reduced.dtype)
                if same and op.begin >= collective.issued.begin:
                    yield op, _innermost(ranges, op)
