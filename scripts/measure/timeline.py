"""Shows which collectives of a training step run beside the main thread's work.

    python scripts/timeline.py --assert --write
    python scripts/timeline.py --mesh dp=2,tp=2 --trace step.json

Starts ranks on this machine (gloo, CPU) that train a Llama with float8 gathers, takes a trace of a
step by torch.profiler on rank 0, and reads the trace: a table of collectives, and a picture. Facts
about the order of events don't depend on the machine; times do. `--trace` keeps the trace, trimmed,
for chrome://tracing or Perfetto.
"""

import argparse
import math
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from bench_ranks import run_on_ranks
from bench_step import mesh_text, mesh_type
from benchmarks import DOCS, Check, markdown, positive
from llama import MODELS
from timeline_picture import draw
from timeline_step import FORWARD, PRECOMPUTE, trace_step
from timeline_trace import FLOAT8_WEIGHTS, KINDS, PRECOMPUTED, Span, Timeline, read

PAGE = DOCS / "timeline.md"
PAGE_TEXT = """\
<!-- Made by `python scripts/timeline.py --write`. -->

# The timeline of a training step

{table}

{remarks}

![lanes of the main thread and of each kind of collective](timeline.png)

Boxes of blocks bear their numbers, and so do the gathers of their weights and the reduce-scatters
of their gradients. FSDP2 begins a block's gather before it runs the block that comes first, in
forward and in backward; on the main thread dark is waiting, and a gather overlaps where it is not
dark above. FSDP2 waits for a reduce-scatter where it issues it: on GPUs a stream does, on CPUs the
main thread. precompute's all-reduce is issued within the call, which returns without waiting; the
next batch and all that needs no scale come first. The wait is in the gather of the first block,
where weights are cast. However late other ranks come to the all-reduce, until then nobody waits for
it. (The gather of the embedding and the head, in bf16, comes before that and waits for late ranks
in any case.)

In the trace:

{checks}

    {command}

- Model: the {model} Llama of `scripts/llama.py`, recipe tensorwise, {mesh}, {batch_size} x
  {seq_len} tokens. The step begins where the last one's gradients are complete: AdamW, precompute,
  the next batch, forward, loss, backward.
- {ranks} ranks of one thread on {machine}.
- The trace is rank 0's, by torch.profiler, of the shortest of {repeat} steps.
- Two pauses are made on purpose: the last rank comes {late:g} ms late to precompute, as some rank
  always does, and rank 0's all-reduce waits for it; a batch takes {loading:g} ms to load.
- FSDP2 was told to gather asynchronously (`_set_unshard_async_op`, with explicit forward
  prefetching), as gloo needs for any overlap.
- "under way": from when a thread of gloo begins a collective until it is done, which includes
  waiting for other ranks. "waiting": the main thread is in `wait_tensor`, or in FSDP2's Python code
  between the issue of a collective, or the beginning of the copy out of a gather's result, and its
  next operator. "beside work" is what is left of "under way" without that and without the operator
  that issues the collective itself: a lower bound.
"""


def table(timeline: Timeline) -> str:
    """Markdown: for each kind of collective, how many, how long, and beside the main thread's work.

    Times of collectives that are under way together add up.
    """
    lines = [["collective", "count", "under way, ms", "beside work, ms", "overlapped"]]
    for kind in KINDS:
        found = timeline.of(kind)
        if not found:
            continue
        under_way = sum(c.under_way.duration for c in found)
        beside = sum(map(timeline.overlapped, found))
        share = f"{100 * beside / under_way:.0f} %"
        lines.append([kind, str(len(found)), f"{under_way:.2f}", f"{beside:.2f}", share])
    return markdown(lines)


def remarks(timeline: Timeline) -> str:
    """What the table doesn't say of precompute's all-reduce."""
    returned = timeline.phase(PRECOMPUTE).end
    sentences = []
    for collective in timeline.of(PRECOMPUTED):
        left = collective.under_way.end - returned
        state = f"went on for {left:.2f} ms" if left > 0 else f"had ended {-left:.2f} ms before"
        sentences.append(f"When precompute returned, its all-reduce {state}.")
    for wait, _ in timeline.precompute_waits:
        between = Span("between", returned, wait.begin)
        other = sum(map(between.shared, timeline.waits))
        sentences.append(
            f"It was waited for {between.duration:.2f} ms after the return, {other:.2f} ms of them "
            f"spent waiting for other collectives; this wait took {wait.duration:.2f} ms."
        )
    return "\n".join(sentences)


def checks(timeline: Timeline) -> list[Check]:
    """What is said of precompute's all-reduce, looked up in the order of the trace's events."""
    call, forward = timeline.phase(PRECOMPUTE), timeline.phase(FORWARD)
    reductions, waits = timeline.of(PRECOMPUTED), timeline.precompute_waits
    gathers = timeline.of(FLOAT8_WEIGHTS)
    at_once = [wait for wait in timeline.waits if call.contains(wait)]
    first_use = [
        (op, within)
        for op, within in waits
        if gathers and gathers[0].within == within and op.end <= gathers[0].issued.begin
    ]
    return [
        Check(
            "precompute issues one all-reduce before it returns",
            len(reductions) == 1 and call.contains(reductions[0].issued),
        ),
        Check("precompute waits for nothing", not at_once),
        Check(
            "its result is waited for once, in forward",
            len(waits) == 1 and forward.contains(waits[0][0]),
        ),
        Check(
            "the wait is where the first float8 weights are cast, just before their gather",
            len(first_use) == 1,
        ),
    ]


def machine() -> str:
    """Where the figures are from."""
    return f"{platform.machine()}, {os.cpu_count()} cores; torch {torch.__version__}"


def not_negative(text: str) -> float:
    """The type of an option."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a number that is not negative")
    return value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--mesh", type=mesh_type, default=(2, 1), help="dp=N or dp=N,tp=N; default: dp=2")
    add("--model", choices=MODELS, default="small", help="default: small")
    add("--batch-size", type=positive, default=4, help="rows of the global batch; %(default)s")
    add("--seq-len", type=positive, default=64, help="tokens per row; %(default)s")
    for name, default, meaning in (
        ("--late", 3.0, "that the last rank is late for precompute"),
        ("--loading", 5.0, "until the next batch is there"),
    ):
        text = f"ms {meaning}; %(default)s"
        add(name, type=not_negative, default=default, metavar="MS", help=text)
    add("--repeat", type=positive, default=20, help="steps that are traced; %(default)s")
    add("--trace", type=Path, metavar="FILE", help="keep the trace there")
    add("--write", action="store_true", help=f"write docs/{PAGE.name} and its picture")
    add("--assert", dest="asserted", action="store_true", help="fail if the order is another one")
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(argv)
    if args.mesh[0] < 2:
        parser.error("--mesh needs dp=2 or more: it is about FSDP2's gathers")
    if args.batch_size % args.mesh[0]:
        parser.error(f"--batch-size {args.batch_size} is no multiple of dp={args.mesh[0]}")
    args.device, args.threads = torch.device("cpu"), 1
    kept = [word for i, word in enumerate(argv) if "--trace" not in argv[max(i - 1, 0) : i + 1]]
    args.command = shlex.join(["python", f"scripts/{parser.prog}", *kept])
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(argv)
    ranks = math.prod(args.mesh)
    with tempfile.TemporaryDirectory() as folder:
        trace = (args.trace or Path(folder) / "trace.json").absolute()
        sizes = (MODELS[args.model], args.batch_size, args.seq_len)
        options = (args.mesh, *sizes, args.late / 1e3, args.loading / 1e3, args.repeat)
        run_on_ranks(ranks, args, trace_step, trace, *options)
        timeline = read(trace)
    found = checks(timeline)
    verdict = [f"{'holds' if check.holds else 'BROKEN'}: {check.sentence}" for check in found]
    print("\n".join([table(timeline), "", remarks(timeline), *verdict]))
    if args.write:
        setting = {"mesh": mesh_text(args.mesh), "ranks": ranks, "machine": machine()}
        text = PAGE_TEXT.format(
            table=table(timeline),
            remarks=remarks(timeline),
            checks="\n".join(f"- {sentence}" for sentence in verdict),
            **(vars(args) | setting),
        )
        PAGE.write_text(text)
        draw(timeline, PAGE.with_suffix(".png"))
        print(f"written: {PAGE}")
    return int(args.asserted and not all(check.holds for check in found))


if __name__ == "__main__":
    sys.exit(main())
