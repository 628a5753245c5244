"""A run of `scripts.prove` on a rank: its stages, its page and its exit status."""

import argparse
from importlib import import_module

from scripts.prove import page
from scripts.prove.results import read
from scripts.prove.runner import Runner
from scripts.prove.stages import STAGES


def run(args: argparse.Namespace) -> int:
    runner = Runner(args.out, args.seconds)
    on_gpus = runner.has_gpu()
    import_module("scripts.prove.checks")  # once, for the processes of all stages
    here = {"always", *["GPUs"] * on_gpus, *["one GPU"] * (on_gpus and runner.ranks == 1)}
    usual = (stage.name for stage in STAGES.values() if stage.where in here)
    chosen = [*dict.fromkeys(args.only or usual)]
    total = sum(STAGES[name].seconds for name in chosen)
    used = 0.0
    for name in chosen:
        used += STAGES[name].seconds
        end = args.seconds * used / total  # what earlier stages leave is for later ones
        if runner.rank == 0:
            print(f"{name}: ends {end - runner.seconds():.0f} s from now at the latest", flush=True)
        outcome = runner.run(STAGES[name], end)
        if runner.rank == 0:
            found = [r for r in read(runner.results) if r.stage == name]
            print(f"{name}: {outcome}; {page.counts(found)}", flush=True)
    status = 0
    if runner.rank == 0:
        results = page.latest([runner.results])
        figure = "page.svg" if page.draw(results, args.out / "page.svg") else ""
        (args.out / "page.md").write_text(page.text(results, figure))
        print(f"\n{page.verdict(results)}\n\n{args.out}/page.md has all tables. ", end="")
        print(f"{runner.results} has all readings: send this file.", flush=True)
        status = int(page.fails(results, chosen))
    return runner.agree(status)
