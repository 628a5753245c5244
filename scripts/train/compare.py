"""Compare runs of scripts.train.train with a bf16 run: communicated bytes, losses, verdicts.

python -m scripts.train.compare runs/bf16 runs/tensorwise --assert
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.common.markdown import table
from scripts.common.options import command_parser

LAST_STEPS = 20
MAX_DIFFERENCE = 0.01
MAX_FRACTION_OF_FIRST = 0.7


def read_run(folder: Path) -> dict[str, Any]:
    """Read a run of scripts.train.train: losses, speed, bytes of the collectives of one step.

    Raises:
        SystemExit: a file is missing or truncated, or steps are missing.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = json.loads((folder / "comm.json").read_text())
        if len(steps) != config["steps"]:
            raise ValueError(f"metrics.jsonl holds {len(steps)} of {config['steps']} steps")
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"{folder} is not a finished run of scripts.train.train: {error}")
    candidates = import_module("scripts.common.candidates")
    # The very last step is left out, because the audit slowed it down.
    speeds = [step["tokens_per_second"] for step in steps[:-1][-LAST_STEPS:] or steps]
    wire = dict.fromkeys(config.get(f"{kind}_transport") for kind in ("gradient", "reduce"))
    sums = "|".join(filter(None, wire))
    return {
        "name": config["recipe"] + (f", sums in {sums}" if sums else ""),
        "losses": [float(step["loss"]) for step in steps],
        "tokens_per_second": fmean(speeds),
        "bytes": sum(row["bytes"] for row in rows),
        "float8_bytes": sum(row["float8_bytes"] for row in rows),
        "all_gather_bytes": sum(row["bytes"] for row in rows if row["op"] == "all_gather"),
        "gathers_float8": candidates.gathers_float8(config["recipe"]),
    }


def last_loss(run: dict[str, Any]) -> float:
    """The mean of the last `LAST_STEPS` losses, or of all if there are fewer."""
    return fmean(run["losses"][-LAST_STEPS:])


def problems(baseline: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """List what is wrong with `run`. (The conditions are written so that NaN is a problem too.)"""
    wrong = []
    if not abs(loss_difference(baseline, run)) <= MAX_DIFFERENCE:
        wrong.append(f"the losses differ by more than {MAX_DIFFERENCE:.0%}")
    for compared in (baseline, run):
        if not last_loss(compared) < MAX_FRACTION_OF_FIRST * compared["losses"][0]:
            below = f"{MAX_FRACTION_OF_FIRST:.0%} of its first loss"
            wrong.append(f"{compared['name']} did not get below {below}")
    # If its recipe supports that, a run that gathers anything must gather float8.
    if run["gathers_float8"] and run["all_gather_bytes"] and not run["float8_bytes"]:
        wrong.append(f"{run['name']} communicated nothing in float8")
    return wrong


def loss_difference(baseline: dict[str, Any], run: dict[str, Any]) -> float:
    """The relative difference of the last losses."""
    return last_loss(run) / last_loss(baseline) - 1


def report(baseline: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    """The comparison and its verdicts as text."""
    of = f"of {baseline['name']}'s"
    head = ["bytes of a step", "gathers", of, "all collectives", of, "first loss"]
    head += [f"mean of last {LAST_STEPS}", f"above {baseline['name']}'s", "tokens/s"]
    rows = [
        [
            compared["name"],
            *share(compared["all_gather_bytes"], baseline["all_gather_bytes"]),
            *share(compared["bytes"], baseline["bytes"]),
            f"{compared['losses'][0]:.4f}",
            f"{last_loss(compared):.4f}",
            f"{loss_difference(baseline, compared):+.2%}",
            f"{compared['tokens_per_second']:,.0f}",
        ]
        for compared in (baseline, *runs)
    ]
    return "\n".join([table(head, rows, "lr"), *(verdict(baseline, run) for run in runs)])


def share(size: int, whole: int) -> tuple[str, str]:
    """Bytes, and their ratio to those of the baseline, which are 0 on a single rank."""
    return f"{size:,}", f"{size / whole:.3f}" if whole else ""


def verdict(baseline: dict[str, Any], run: dict[str, Any]) -> str:
    """The verdict on one run as text."""
    if wrong := "; ".join(problems(baseline, run)):
        return f"{run['name']}: NOT AS EXPECTED: {wrong}"
    return (
        f"{run['name']}: loss within {MAX_DIFFERENCE:.0%} of {baseline['name']}'s, and both below "
        f"{MAX_FRACTION_OF_FIRST:.0%} of their first"
    )


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("scripts.train.compare", __doc__)
    parser.add_argument("baseline", type=Path, help="folder of the bf16 run")
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="run", help="folder of a run to judge"
    )
    parser.add_argument("--out", type=Path, default=Path(), help="folder of report.html")
    parser.add_argument(
        "--assert", dest="strict", action="store_true", help="fail when a verdict is bad"
    )
    args = parser.parse_args(argv)
    baseline, *runs = every = [read_run(folder) for folder in (args.baseline, *args.runs)]
    if len({run["name"] for run in every}) < len(every):
        parser.error(f"runs are alike: {', '.join(run['name'] for run in every)}")
    args.out.mkdir(parents=True, exist_ok=True)
    print(report(baseline, runs))
    page = import_module("fp8_dist.report.page")
    headlines, _ = page.write(args.out / "report.html", [args.baseline, *args.runs])
    print(*headlines, sep="\n", end="\n" if headlines else "")
    print(f"written: {args.out / 'report.html'}")
    return 1 if args.strict and any(problems(baseline, run) for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
