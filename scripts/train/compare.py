"""Compares a run of scripts.train.train with a bf16 run: losses, bytes on the wire, a plot.

python -m scripts.train.compare runs/bf16 runs/tensorwise --assert
"""

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # before pyplot chooses: there may be no display
import matplotlib.pyplot as plt

from scripts.common.markdown import table
from scripts.common.options import command_parser

LAST_STEPS = 20
MAX_DIFFERENCE = 0.01
MAX_FRACTION_OF_FIRST = 0.7
SMOOTHING_STEPS = 5
Figures = dict[str, Any]


def read_run(folder: Path) -> Figures:
    """What scripts.train.train wrote into a folder: losses, speed, bytes of one step's collectives.

    Raises:
        SystemExit: a file is missing or cut off, or steps are missing.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = json.loads((folder / "comm.json").read_text())
        if len(steps) != config["steps"]:
            raise ValueError(f"metrics.jsonl holds {len(steps)} of {config['steps']} steps")
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"{folder} is not a finished run of scripts.train.train: {error}")
    # The very last step ran under the audit, which takes time of its own.
    speeds = [step["tokens_per_second"] for step in steps[:-1][-LAST_STEPS:] or steps]
    losses = [step["loss"] for step in steps]
    return {
        "name": config["recipe"],
        "losses": losses,
        "last_loss": fmean(losses[-LAST_STEPS:]),
        "tokens_per_second": fmean(speeds),
        "bytes": sum(row["bytes"] for row in rows),
        "float8_bytes": sum(row["float8_bytes"] for row in rows),
        "all_gather_bytes": sum(row["bytes"] for row in rows if row["op"] == "all_gather"),
    }


def problems(baseline: Figures, run: Figures) -> list[str]:
    """Returns what is wrong with `run`. (Conditions are such that a NaN is a problem too.)"""
    found = []
    if not abs(loss_difference(baseline, run)) <= MAX_DIFFERENCE:
        found.append(f"the losses differ by more than {MAX_DIFFERENCE:.0%}")
    for each in (baseline, run):
        if not each["last_loss"] < MAX_FRACTION_OF_FIRST * each["losses"][0]:
            below = f"{MAX_FRACTION_OF_FIRST:.0%} of its first loss"
            found.append(f"{each['name']} did not get below {below}")
    return found


def loss_difference(baseline: Figures, run: Figures) -> float:
    """The relative difference of the last losses."""
    return float(run["last_loss"] / baseline["last_loss"] - 1)


def report(baseline: Figures, run: Figures) -> str:
    """Renders the comparison and its verdict for people."""
    name, against = run["name"], baseline["name"]
    head = ["", "first loss", f"mean of last {LAST_STEPS}", "bytes per step", "of it float8"]
    rows = [
        [
            each["name"],
            f"{each['losses'][0]:.4f}",
            f"{each['last_loss']:.4f}",
            f"{each['bytes']:,}",
            f"{each['float8_bytes']:,}",
            f"{each['tokens_per_second']:,.0f}",
        ]
        for each in (baseline, run)
    ]
    lines = [table([*head, "tokens/s"], rows, "lr")]
    lines.append(f"loss of {name} against {against}: {loss_difference(baseline, run):+.2%}")
    for key, what in (
        ("all_gather_bytes", "bytes of all-gathers, unconverted layers included"),
        ("bytes", "bytes of all collectives, gradients and sums included"),
    ):
        if baseline[key]:  # one rank gathers nothing, and may reduce nothing either
            lines.append(f"{what}, {name} / {against}: {run[key] / baseline[key]:.3f}")
    wrong = "; ".join(problems(baseline, run))
    good = (
        f"within {MAX_DIFFERENCE:.0%} of {against}, and both below {MAX_FRACTION_OF_FIRST:.0%} of "
        f"their first loss"
    )
    lines.append(f"verdict: {f'NOT AS EXPECTED: {wrong}' if wrong else good}")
    return "\n".join(lines)


def plot(runs: list[Figures], path: Path) -> None:
    """Draws the losses of runs, each the mean of up to `SMOOTHING_STEPS` steps."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for run, style in zip(runs, ("-", "--"), strict=True):
        losses, steps = run["losses"], range(1, len(run["losses"]) + 1)
        windows = [losses[max(0, step - SMOOTHING_STEPS) : step] for step in steps]
        axes.plot(steps, [*map(fmean, windows)], style, label=run["name"])
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.set_title(f"Training loss, mean of the last {SMOOTHING_STEPS} steps")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = command_parser("scripts.train.compare", __doc__)
    parser.add_argument("baseline", type=Path, help="folder of the bf16 run")
    parser.add_argument("run", type=Path, help="folder of the run to judge")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of loss.png")
    parser.add_argument(
        "--assert", dest="strict", action="store_true", help="fail when the verdict is bad"
    )
    args = parser.parse_args(argv)
    baseline, run = read_run(args.baseline), read_run(args.run)
    if baseline["name"] == run["name"]:
        parser.error(f"both runs are {run['name']} runs: compare different recipes")
    args.out.mkdir(parents=True, exist_ok=True)
    plot([baseline, run], args.out / "loss.png")
    print(report(baseline, run))
    print(f"written: {args.out / 'loss.png'}")
    return 1 if args.strict and problems(baseline, run) else 0


if __name__ == "__main__":
    sys.exit(main())
