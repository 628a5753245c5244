"""A run of `scripts.prove` on a rank: its stages, its page and its exit status."""

import argparse
import json
import os
import time
from importlib import import_module
from pathlib import Path

from scripts.prove import page
from scripts.prove.results import read
from scripts.prove.runner import Runner
from scripts.prove.stages import STAGES

SHOWN = 10  # lines of cases without a right result, before the verdict


def run(args: argparse.Namespace) -> int:
    runner = Runner(args.out)
    checks = import_module("scripts.prove.checks")  # once, for the processes of all stages
    try:
        on_gpus = runner.has_gpu()
    except RuntimeError as error:
        if runner.rank == 0 and not tell_launcher(f"scripts.prove: {error}"):
            print(f"scripts.prove: {error}", flush=True)
        return runner.agree(1)
    here = {"always", *["GPUs"] * on_gpus, *["one GPU"] * (on_gpus and runner.ranks == 1)}
    usual = (stage.name for stage in STAGES.values() if stage.where in here)
    chosen = [*dict.fromkeys(args.only or usual)]
    seconds = {name: STAGES[name].seconds for name in chosen}
    if "bits" in chosen:
        seconds["bits"] += checks.seconds_of_bits(runner.place("cuda" if on_gpus else "cpu"))
    total, used = sum(seconds.values()), 0.0
    allowed = args.seconds or total
    runner.wait_for_others(allowed + 600)
    for name in chosen:
        used += seconds[name]
        end = allowed * used / total  # what earlier stages leave is for later ones
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
        print(f"\n{args.out}/page.md has all tables. ", end="")
        print(f"{runner.results} has all readings: send this file.\n")
        verdict = "\n".join([*page.bad(results)[-SHOWN:], page.verdict(results)])
        status = int(page.fails(results, chosen))
        is_told = status and tell_launcher(verdict)
        print(page.verdict(results) if is_told else verdict, flush=True)
    return runner.agree(status)


def tell_launcher(text: str) -> bool:
    """Let torchrun, if it runs, end its own report of the failure with a text.

    It prints the report after all output of the ranks, so that what they say scrolls away.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if path:
        message = {"message": f"\n{text}", "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": message}))
    return bool(path)
