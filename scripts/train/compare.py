"""Compares a run of scripts.train.train with a bf16 run: losses, bytes on the wire, a plot.

python -m scripts.train.compare runs/bf16 runs/tensorwise --assert
"""

import json
import sys
from pathlib import Path
from typing import Any, get_args

import matplotlib as mpl

mpl.use("Agg")  # before pyplot chooses: there may be no display
import matplotlib.pyplot as plt

from fp8_dist.config import Operand
from scripts.common.candidates import BF16, config_of
from scripts.common.markdown import table
from scripts.common.options import command_parser

LAST_STEPS = 20
MAX_DIFFERENCE = 0.01
MAX_FRACTION_OF_FIRST = 0.7
SMOOTHING_STEPS = 5
SHORTEST_ROW = 16  # of a weight; what float8 GEMMs demand


def read_run(folder: Path) -> dict[str, Any]:
    """Reads what scripts.train.train wrote into `folder`.

    Returns:
        name, losses (one per step), tokens_per_second (mean of the last steps), the bytes of one
        step's collectives as one rank sees them (bytes, float8_bytes, all_gather_bytes),
        gathers_float8, whether its recipe promises that, and unexpected_gathers, see there.

    Raises:
        SystemExit: a file is missing or cut off, or steps are missing.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = json.loads((folder / "comm.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        sys.exit(f"{folder} is not a finished run of scripts.train.train: {error}")
    if len(steps) != config["steps"]:
        sys.exit(
            f"{folder} is not a finished run of scripts.train.train: metrics.jsonl holds "
            f"{len(steps)} of {config['steps']} steps"
        )
    # The very last step ran under the audit, which takes time of its own.
    speeds = [step["tokens_per_second"] for step in steps[:-1][-LAST_STEPS:] or steps]
    promised = gathers_float8(config["recipe"])
    return {
        "name": config["recipe"],
        "losses": [step["loss"] for step in steps],
        "tokens_per_second": sum(speeds) / len(speeds),
        "bytes": sum(row["bytes"] for row in rows),
        "float8_bytes": sum(row["float8_bytes"] for row in rows),
        "all_gather_bytes": sum(row["bytes"] for row in rows if row["op"] == "all_gather"),
        "gathers_float8": promised,
        "unexpected_gathers": unexpected_gathers(rows, config) if promised else [],
    }


def gathers_float8(recipe: str) -> bool:
    """Whether all gathers for float8 layers are float8: one copy serves both uses of an operand."""
    return recipe != BF16 and all(
        config_of(recipe).gather_cast(operand) is not None for operand in get_args(Operand)
    )


def unexpected_gathers(rows: list[dict[str, Any]], config: dict[str, Any]) -> list[str]:
    """Finds all-gathers in high precision that a float8 run should have made in float8.

    A module without float8 layers may gather what it likes. Any other one, and the code outside
    of modules (module "", where FSDP2's prefetches run too), may gather the parameters in it that
    are not of float8 layers, and no more. Neither a float8 layer's weight nor its input or output
    gradient fits. Scales that travel with float8 rows are not counted.

    Args:
        rows: of comm.json, one per op, axis, dtype and module.
        config: of config.json: `float8_layers`, names; `high_precision_gather`, elements that a
            gather of a parameter moves, by its name.

    Returns:
        A line for each module and axis that gathers too much.
    """
    places: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["op"] == "all_gather":
            places.setdefault((row["module"], row["axis"]), []).append(row)
    lines = []
    for (module, axis), here in places.items():
        if not any(lies_in(layer, module) for layer in config["float8_layers"]):
            continue
        sizes = config["high_precision_gather"].items()
        own = sum(size for name, size in sizes if lies_in(name, module))
        allowed = own * sum(row["count"] for row in here)
        elements = sum(row["elements"] for row in here if not row["float8_bytes"])
        elements -= row_scales(here)
        if elements > allowed:
            lines.append(
                f"{module or 'the whole model'} gathered {elements:,} elements in high precision "
                f"on {axis}, where {allowed:,} are not float8's"
            )
    return lines


def row_scales(rows: list[dict[str, Any]]) -> int:
    """Counts the float32 numbers in FSDP2's mixed gathers that may be scales of float8 rows."""
    float8 = sum(row["elements"] for row in rows if row["float8_bytes"])
    float32 = (row for row in rows if row["dtype"] == "torch.float32" and row["in_mixed_gather"])
    return min(sum(row["elements"] for row in float32), float8 // SHORTEST_ROW)


def lies_in(name: str, module: str) -> bool:
    """Whether the module or parameter `name` is `module` or a part of it."""
    return not module or f"{name}.".startswith(f"{module}.")


def mean_of_last(values: list[float]) -> float:
    """Averages the last `LAST_STEPS` values, or all if there are fewer."""
    last = values[-LAST_STEPS:]
    return sum(last) / len(last)


def problems(baseline: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """Returns what is wrong with `run`. (Conditions are such that a NaN is a problem too.)"""
    found = []
    if not abs(loss_difference(baseline, run)) <= MAX_DIFFERENCE:
        found.append(f"the losses differ by more than {MAX_DIFFERENCE:.0%}")
    for each in (baseline, run):
        if not mean_of_last(each["losses"]) < MAX_FRACTION_OF_FIRST * each["losses"][0]:
            below = f"{MAX_FRACTION_OF_FIRST:.0%} of its first loss"
            found.append(f"{each['name']} did not get below {below}")
    # A run that gathers anything gathers float8, if its recipe can.
    if run["gathers_float8"] and run["all_gather_bytes"] and not run["float8_bytes"]:
        found.append(f"{run['name']} communicated nothing in float8")
    return found + run["unexpected_gathers"]


def loss_difference(baseline: dict[str, Any], run: dict[str, Any]) -> float:
    """The relative difference of the last losses."""
    return mean_of_last(run["losses"]) / mean_of_last(baseline["losses"]) - 1


def report(baseline: dict[str, Any], run: dict[str, Any]) -> str:
    """Renders the comparison and its verdict for people."""
    name, against = run["name"], baseline["name"]
    head = ["", "first loss", f"mean of last {LAST_STEPS}", "bytes per step", "of it float8"]
    rows = [
        [
            each["name"],
            f"{each['losses'][0]:.4f}",
            f"{mean_of_last(each['losses']):.4f}",
            f"{each['bytes']:,}",
            f"{each['float8_bytes']:,}",
            f"{each['tokens_per_second']:,.0f}",
        ]
        for each in (baseline, run)
    ]
    lines = [table([*head, "tokens/s"], rows, "lr")]
    lines.append(f"loss of {name} against {against}: {loss_difference(baseline, run):+.2%}")
    for key, what in (
        ("bytes", "bytes on the wire"),
        ("all_gather_bytes", "bytes of all-gathers alone, unconverted layers included"),
    ):
        if baseline[key]:  # one rank gathers nothing, and may reduce nothing either
            lines.append(f"{what}, {name} / {against}: {run[key] / baseline[key]:.3f}")
    gathers = "every gather for a float8 layer is float8"
    if not run["gathers_float8"]:
        gathers = f"{name} gathers in high precision"
    wrong = "; ".join(problems(baseline, run))
    lines.append(
        f"verdict: NOT AS EXPECTED: {wrong}"
        if wrong
        else f"verdict: within {MAX_DIFFERENCE:.0%} of {against}, and both below "
        f"{MAX_FRACTION_OF_FIRST:.0%} of their first loss; {gathers}"
    )
    return "\n".join(lines)


def running_mean(values: list[float], width: int) -> list[float]:
    """Averages each value with up to `width - 1` values before it."""
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def plot(losses: dict[str, list[float]], path: Path) -> None:
    """Draws the losses of runs by name, smoothed, over their distances to the first run's."""
    figure, (axes, below) = plt.subplots(
        2, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained"
    )
    first, *_ = losses
    reference = running_mean(losses[first], LAST_STEPS)
    for index, (name, values) in enumerate(losses.items()):
        steps = range(1, len(values) + 1)
        style = {"color": f"C{index}", "linestyle": ("-", "--")[index % 2]}
        axes.plot(steps, running_mean(values, SMOOTHING_STEPS), label=name, **style)
        means = running_mean(values, LAST_STEPS)
        distances = [100 * (a / b - 1) for a, b in zip(means, reference, strict=False)]
        below.plot(range(1, len(distances) + 1), distances, **style)
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(f"Training loss, mean of the last {SMOOTHING_STEPS} steps")
    axes.legend()
    below.set_xlabel("step")
    below.set_ylabel(f"% of {first}\n(mean of {LAST_STEPS})")
    below.set_ylim(-200 * MAX_DIFFERENCE, 200 * MAX_DIFFERENCE)
    for each in (axes, below):
        each.grid(alpha=0.3)
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
    plot({each["name"]: each["losses"] for each in (baseline, run)}, args.out / "loss.png")
    print(report(baseline, run))
    print(f"written: {args.out / 'loss.png'}")
    return 1 if args.strict and problems(baseline, run) else 0


if __name__ == "__main__":
    sys.exit(main())
