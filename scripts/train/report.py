"""Makes one HTML page of a run of scripts.train.train: what it was, how it went, its float8.

    python -m scripts.train.report runs/tensorwise

The page needs no network, no script and no other file. It shows what the folder holds, also of a
run that is still going on or that ended early, and says which option makes the rest.
"""

import math
import os
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

import jinja2

from scripts.common.options import command_parser
from scripts.train.report_data import NoRun, Row, Run, read_run
from scripts.train.report_figures import charts, heat_maps

HERE = Path(__file__).parent
MAX_ANOMALIES = 200  # rows of their table
LAST_STEPS = 20
HIDDEN = {"float8_layers"}  # of config.json: too long


def render(run: Run) -> str:
    """The page of a run."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        run=run,
        config=[(key, plain(value)) for key, value in run.config.items() if key not in HIDDEN],
        tiles=tiles(run),
        alerts=alerts(run),
        anomalies=(run.anomalies or [])[:MAX_ANOMALIES],
        charts=charts(run),
        heat_maps=heat_maps(run),
        collectives=collectives(run.comm or []),
    )


def plain(value: Any) -> str:
    """A value of config.json for people."""
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_count else str(value)


def tiles(run: Run) -> list[tuple[str, str]]:
    """Figures that are read first: (value, what it is)."""
    rows, shown = run.metrics, []
    if rows:
        shown.append((f"{rows[-1]['step']:,}", f"of {plain(run.config.get('steps', '?'))} steps"))
    if losses := [row["loss"] for row in rows[-LAST_STEPS:] if "loss" in row]:
        shown.append((f"{fmean(losses):.4f}", f"mean loss of the last {len(losses)} steps"))
    # The audit of the last step takes time of its own.
    if speeds := finite(rows[:-1] or rows, "tokens_per_second"):
        shown.append((f"{median(speeds):,.0f}", "tokens/s on all ranks, median"))
    if sizes := finite(rows, "memory_bytes"):
        shown.append((f"{max(sizes) / 2**30:.2f} GiB", "of memory on rank 0, at most"))
    if isinstance(layers := run.config.get("float8_layers"), list):
        shown.append((f"{len(layers):,}", "float8 layers"))
    if size := sum(row["bytes"] for row in run.comm or []):
        part = sum(row["float8_bytes"] for row in run.comm or []) / size
        shown.append((f"{size / 1e6:,.1f} MB", f"of collectives in a step, {part:.0%} in float8"))
    return shown


def finite(rows: list[Row], name: str) -> list[float]:
    """The finite values of a metric."""
    return [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]


def alerts(run: Run) -> list[str]:
    """Sentences about values that are not finite: where the first of them is."""
    found = []
    for name, title in (("loss", "The loss"), ("grad_norm", "The norm of the gradients")):
        steps = [row["step"] for row in run.metrics if not math.isfinite(row.get(name, 0))]
        if steps:
            found.append(f"{title} is not finite in {len(steps)} steps, first in {steps[0]}.")
    first: dict[str, Row] = {}
    for row in sorted(run.stats or [], key=lambda row: int(row["step"])):
        if not row["finite"]:
            first.setdefault(row["label"], row)
    for label, row in first.items():
        where = f"{row['fqn'] or 'the model'} at step {row['step']}"
        found.append(f"The first values that are not finite in the {label}: {where}.")
    return found


def collectives(rows: list[Row]) -> list[Row]:
    """The rows of comm.json summed over modules."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("op", "axis", "dtype", "in_mixed_gather"))
        groups.setdefault(key, []).append(row)
    summed = []
    for group in groups.values():
        seconds = sum(row["seconds"] for row in group)
        sums = {name: sum(row[name] for row in group) for name in ("count", "elements", "bytes")}
        times = f"{1000 * seconds:.3f}" if math.isfinite(seconds) else ""
        summed.append(group[0] | sums | {"milliseconds": times})
    return summed


def write(path: Path, page: str) -> None:
    """Writes the page at once: nobody sees half of one."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(page, encoding="utf-8")
    os.replace(new, path)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = command_parser("scripts.train.report", __doc__)
    parser.add_argument("run", type=Path, help="the --out of scripts.train.train")
    parser.add_argument("--out", type=Path, help="the page; default: report.html in RUN")
    args = parser.parse_args(argv)
    out = args.out or args.run / "report.html"
    try:
        run = read_run(args.run)
        write(out, render(run))
    except NoRun as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror or error}")
    for note in run.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
