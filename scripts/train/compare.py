"""Compare runs of scripts.train.train with a bf16 run: communicated bytes, losses, verdicts.

python -m scripts.train.compare runs/bf16 runs/tensorwise --assert
"""

import io
import json
import sys
from contextlib import redirect_stderr
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.common.markdown import table
from scripts.common.options import command_parser

LAST_STEPS = 20
MAX_DIFFERENCE = 0.01
MAX_FRACTION_OF_FIRST = 0.7


def read_run(folder: Path, name: str) -> dict[str, Any]:
    """Read a run of scripts.train.train: losses, and bytes of the collectives of one step.

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
    return {
        "name": name,
        "losses": [float(step["loss"]) for step in steps],
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
    head = ["run", "gathers of a step, MB", of, "all collectives, MB", of]
    head += [f"loss, last {LAST_STEPS} steps", f"above {baseline['name']}'s"]
    rows = [
        [
            compared["name"],
            *share(compared["all_gather_bytes"], baseline["all_gather_bytes"]),
            *share(compared["bytes"], baseline["bytes"]),
            f"{last_loss(compared):.4f}",
            f"{loss_difference(baseline, compared):+.2%}" if compared is not baseline else "",
        ]
        for compared in (baseline, *runs)
    ]
    return f"{table(head, rows, 'lr')}\n\n{verdict(baseline, runs)}"


def share(size: int, whole: int) -> tuple[str, str]:
    """Megabytes, and their ratio to those of the baseline, which are 0 on a single rank."""
    return f"{size / 1e6:.2f}", f"{size / whole:.2f}" if whole else ""


def verdict(baseline: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    """A line for each run that is not as expected, or one line if all are."""
    found = {run["name"]: "; ".join(problems(baseline, run)) for run in runs}
    lines = [f"{name}: NOT AS EXPECTED: {wrong}" for name, wrong in found.items() if wrong]
    as_expected = (
        f"As expected: losses are within {MAX_DIFFERENCE:.0%} of {baseline['name']}'s, and below "
        f"{MAX_FRACTION_OF_FIRST:.0%} of the first ones."
    )
    return "\n".join(lines or [as_expected])


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
    folders = [args.baseline, *args.runs]
    names = import_module("fp8_dist.report.data").names_of(folders)
    baseline, *runs = map(read_run, folders, names)
    args.out.mkdir(parents=True, exist_ok=True)
    page = import_module("fp8_dist.report.page")
    with redirect_stderr(io.StringIO()):  # it says what it draws, for pages that take minutes
        headlines, _ = page.write(args.out / "report.html", folders)
    print(report(baseline, runs), *headlines, sep="\n")
    print(f"written: {args.out / 'report.html'}")
    return 1 if args.strict and any(problems(baseline, run) for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
