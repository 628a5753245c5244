"""Shows which collectives of a training step run beside the main thread's work.

    python -m scripts.measure.timeline --assert --write

Starts ranks on this machine (gloo, CPU) that train a Llama with float8 gathers, traces steps with
torch.profiler on rank 0, and reads the trace of the shortest one. The order of events, which
`--assert` checks, does not depend on the machine; times do.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.common.blocks import DOCS, replace_block
from scripts.common.llama import MODELS
from scripts.common.markdown import table
from scripts.common.options import command_parser, positive
from scripts.common.ranks import run_on_ranks
from scripts.common.report import Check, machine
from scripts.measure.trace import FLOAT8_WEIGHTS, KINDS, PRECOMPUTED, Timeline, read
from scripts.measure.traced_step import BATCH_SIZE, FORWARD, PRECOMPUTE, events_of, trace_step

PAGE = DOCS / "timeline.md"
MODEL = MODELS["small"]


def collectives_table(timeline: Timeline) -> str:
    """For each kind of collective: how many, how long, and how long beside the main thread's work.

    Times of collectives that are under way together add up.
    """
    lines = []
    for kind in KINDS:
        found = timeline.of(kind)
        if found:
            under_way = sum(c.under_way.end - c.under_way.begin for c in found)
            beside = sum(map(timeline.overlapped, found))
            share = f"{100 * beside / under_way:.0f} %"
            lines.append([kind, str(len(found)), f"{under_way:.2f}", f"{beside:.2f}", share])
    head = ["collective", "count", "under way, ms", "beside work, ms", "overlapped"]
    return table(head, lines, "lr")


def checks(timeline: Timeline) -> list[Check]:
    """What is said of precompute's all-reduce, looked up in the order of the trace's events."""
    call, forward = timeline.phases[PRECOMPUTE], timeline.phases[FORWARD]
    reductions, waits = timeline.of(PRECOMPUTED), timeline.precompute_waits
    gathers = timeline.of(FLOAT8_WEIGHTS)
    first_use = [
        op
        for op, within in waits
        if gathers and gathers[0].within == within and op.end <= gathers[0].issued.begin
    ]
    return [
        Check(
            "precompute issues one all-reduce before it returns",
            len(reductions) == 1 and call.contains(reductions[0].issued),
        ),
        Check("precompute waits for nothing", not any(map(call.contains, timeline.waits))),
        Check(
            "its result is waited for once, in forward",
            len(waits) == 1 and forward.contains(waits[0][0]),
        ),
        Check(
            "the wait is where the first float8 weights are cast, just before their gather",
            len(first_use) == 1,
        ),
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, with `mesh` as (dp, tp); errors end the process with status 2."""
    parser = command_parser("scripts.measure.timeline", __doc__)
    add = parser.add_argument
    add("--dp", type=positive, default=2, help="FSDP2 ranks, 2 or more; %(default)s")
    add("--tp", type=positive, default=1, help="tensor-parallel ranks; %(default)s")
    add("--repeat", type=positive, default=20, help="steps that are traced; %(default)s")
    add("--trace", type=Path, metavar="FILE", help="keep the trace there, for Perfetto")
    add("--write", action="store_true", help="replace the table of docs/timeline.md")
    add("--assert", dest="asserted", action="store_true", help="fail if the order is another one")
    args = parser.parse_args(argv)
    if args.dp < 2:
        parser.error(f"--dp {args.dp}: use 2 or more, it is about FSDP2's gathers")
    if BATCH_SIZE % args.dp:
        parser.error(f"--dp {args.dp} does not divide the {BATCH_SIZE} rows of a batch")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        trace = (args.trace or Path(folder) / "trace.json").absolute()
        mesh = (args.dp, args.tp)
        run_on_ranks(math.prod(mesh), trace_step, trace, MODEL, mesh, args.repeat)
        timeline = read(events_of(trace))
    found = checks(timeline)
    verdicts = [f"{'holds' if check.holds else 'BROKEN'}: {check.sentence}" for check in found]
    shown = collectives_table(timeline)
    print("\n".join([shown, "", *verdicts]))
    if args.write:
        listed = "\n".join(f"- {verdict}" for verdict in verdicts)
        replace_block(PAGE, "timeline", f"{shown}\n\n{listed}\n\nOn {machine('cpu', 1)}.")
    return int(args.asserted and not all(check.holds for check in found))


if __name__ == "__main__":
    sys.exit(main())
