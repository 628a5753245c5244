"""What a training step costs in communication and memory on thousands of ranks, before it is run.

    python scripts/plan.py --model 405b --mesh dp=2048,tp=8 --recipe tensorwise

Builds the real model of scripts/llama.py under the library (TP + SP over tp, FSDP2 over dp, AdamW),
in one process that plays rank 0 of a fake world with fake tensors, and runs one real step of it, as
it is from the second one on. All counts and sizes are those of this run. bf16 and, where it is
installed, torchao (tensorwise, its own styles and precompute) are run in the same way beside it.
"""

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from options import BF16
from plan_links import Links, seconds_by_axis
from plan_options import make_parser, parse_options, worlds
from plan_page import page, report
from plan_runs import Run, run_all, versions
from plan_step import PEER, Plan

PAGE = Path(__file__).resolve().parent.parent / "docs" / "plan.md"


def plans_of(args: argparse.Namespace) -> list[Plan]:
    """The chosen recipes, bf16 and the peer on the chosen mesh; the first of them on --scale's."""
    chosen = [(args.axes, variant) for variant in (*args.recipe, BF16, PEER)]
    if args.scale:
        grown = (args.recipe[0], BF16, PEER)
        chosen += [(axes, variant) for axes in worlds(args.axes) for variant in grown]
    plans: list[Plan] = []
    for axes, variant in chosen:
        plan = Plan(args.config, axes, variant, args.batch_size, args.seq_len)
        if plan not in plans:
            plans.append(plan)
    return plans


def as_json(args: argparse.Namespace, runs: list[Run], time: Any) -> dict[str, Any]:
    """All numbers."""
    return {
        "versions": versions(),
        "links": asdict(args.links),
        "precompute": time if time is None or isinstance(time, str) else asdict(time),
        "runs": [
            asdict(run)
            | {
                "predicted_seconds": None
                if run.measured is None
                else seconds_by_axis(run.measured.collectives, run.plan.axes, args.links)
            }
            for run in runs
        ],
    }


def command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """The options that make the page of these, without those that change nothing in it."""
    shown = {"model": args.model, "mesh": args.mesh, "recipe": " ".join(args.recipe)}
    others = ["batch_size", *(field.name for field in fields(Links))]
    shown |= {n: getattr(args, n) for n in others if getattr(args, n) != parser.get_default(n)}
    if args.seq_len != args.config.max_seq_len:
        shown["seq_len"] = args.seq_len
    options = (f"--{name.replace('_', '-')} {value}" for name, value in shown.items())
    return " ".join((*options, "--scale", "--write"))


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = make_parser(__doc__)
    args = parse_options(parser, argv)
    plans = plans_of(args)
    runs, time = run_all(plans, plans[0] if args.scale else None, args.jobs)
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(args, runs, time), indent=1))
    text = report(args, runs, time)
    print(text)
    if args.write:
        PAGE.write_text(page(command(parser, args), plans[0].ranks, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
