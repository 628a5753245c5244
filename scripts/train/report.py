"""Makes one HTML page of a run of scripts.train.train: what it was, how it went, its float8.

    python -m scripts.train.report runs/tensorwise

The page needs no network and no other file. It shows what the folder holds, also of a run that is
still going on or that ended early, and says which option makes the rest.
"""

import base64
import hashlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from scripts.common.options import command_parser
from scripts.train.report_charts import grids, line
from scripts.train.report_data import METRICS, NoRun, Run, read_run, strings, text

HERE = Path(__file__).parent
# Of anomalies: so many rows of their table, and so many of their steps in the charts.
MAX_ANOMALIES = 200
MAX_MARKED = 20
LAST_STEPS = 20
# The rows of config.json that are shown first, and what they are called.
SHOWN_FIRST = {
    "recipe": "recipe",
    "model": "model",
    "parameters": "parameters",
    "device": "device of rank 0",
    "compile": "torch.compile",
    "steps": "steps",
    "batch_size": "rows of the global batch",
    "seq_len": "tokens per row",
    "lr": "peak learning rate",
    "warmup": "steps of warmup",
    "seed": "seed",
    "data": "text",
    "torch": "torch",
    "fp8_dist": "fp8_dist",
    "python": "Python",
}
# Shown elsewhere on the page.
SHOWN_ELSEWHERE = {"float8_layers", "high_precision_gather", "memory", "dp", "tp"}


def render(run: Run) -> str:
    """The page of a run."""
    scripts = {"plotly": get_plotlyjs(), "page": (HERE / "report.js").read_text()}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    data = {
        "lines": {name: line(run, name) for name in METRICS},
        "grids": grids(run),
        "anomalies": sorted({row["step"] for row in run.anomalies or []})[:MAX_MARKED],
    }
    return environment.get_template("report.html").render(
        run=run,
        summary=summary(run.config),
        config=config_rows(run.config),
        float8_layers=strings(run.config.get("float8_layers")),
        tiles=tiles(run),
        alerts=alerts(run),
        max_anomalies=MAX_ANOMALIES,
        collectives=collectives(run.comm or []),
        timed=any(row["seconds"] is not None for row in run.comm or []),
        memory=text(run.config.get("memory", "")),
        data=data,
        style=(HERE / "report.css").read_text(),
        scripts=scripts,
        # No other script can run, whatever the files of the run hold.
        policy=" ".join(f"'{sha256(script)}'" for script in scripts.values()),
    )


def sha256(script: str) -> str:
    """What a Content-Security-Policy calls a script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def config_rows(config: dict[str, Any]) -> list[tuple[str, str]]:
    """What config.json says, in words, the more important first."""
    rows = [(title, plain(config[name])) for name, title in SHOWN_FIRST.items() if name in config]
    if "dp" in config and "tp" in config:
        rows.insert(min(2, len(rows)), ("mesh", mesh_of(config)))
    rest = config.keys() - SHOWN_FIRST.keys() - SHOWN_ELSEWHERE
    return rows + [(text(name), plain(config[name])) for name in sorted(rest)]


def mesh_of(config: dict[str, Any]) -> str:
    """The mesh, in words."""
    return f"dp {plain(config.get('dp', '?'))} x tp {plain(config.get('tp', '?'))}"


def summary(config: dict[str, Any]) -> str:
    """What was trained, in a line."""
    parts = [plain(config[name]) for name in ("recipe", "model") if name in config]
    if "dp" in config and "tp" in config:
        parts.append(mesh_of(config))
    parts += [f"{name} {plain(config[name])}" for name in ("torch", "fp8_dist") if name in config]
    return ", ".join(parts) or "a run of scripts.train.train"


def plain(value: Any) -> str:
    """A value of config.json for people."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "not set"}[value]
    return f"{value:,}" if isinstance(value, int) and abs(value) < 2**63 else text(value)


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """What is read first: (name, value, what it is)."""
    rows = [row for _, row in sorted(run.metrics.items())]
    shown = []
    if rows:
        wanted = run.config.get("steps")
        of = f"of {plain(wanted)}" if isinstance(wanted, int) else ""
        shown.append(("steps", f"{max(run.metrics):,}", of))
    if losses := [row["loss"] for row in rows[-LAST_STEPS:] if "loss" in row]:
        mean = sum(losses) / len(losses)
        shown.append(
            ("loss", f"{mean:.4f}", f"nats per byte, mean of the last {len(losses)} steps")
        )
    # The audit of the last step takes time of its own.
    if speeds := finite(rows[:-1] or rows, "tokens_per_second"):
        shown.append(("speed", f"{median(speeds):,.0f}", "tokens/s on all ranks, median"))
    if sizes := finite(rows, "memory_bytes"):
        shown.append(("memory", f"{max(sizes) / 2**30:.2f} GiB", "rank 0, largest of all steps"))
    if layers := strings(run.config.get("float8_layers")):
        shown.append(("float8 layers", f"{len(layers):,}", text(run.config.get("recipe", ""))))
    if size := sum(row["bytes"] for row in run.comm or []):
        part = sum(row["float8_bytes"] for row in run.comm or []) / size
        shown.append(("collectives of a step", megabytes(size), f"{part:.0%} of it float8"))
    return shown


def finite(rows: list[dict[str, float]], name: str) -> list[float]:
    """The finite values of a metric."""
    return [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]


def megabytes(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size:,} B"


def alerts(run: Run) -> list[str]:
    """Sentences about values that are not finite: where the first of them is."""
    found = []
    for name, title in (("loss", "The loss"), ("grad_norm", "The norm of the gradients")):
        steps = [
            step for step, row in sorted(run.metrics.items()) if not math.isfinite(row.get(name, 0))
        ]
        if steps:
            found.append(f"{title} is not finite in {steps_text(steps)}.")
    return found + [sentence for _, sentence in sorted(alerts_of_casts(run))]


def alerts_of_casts(run: Run) -> Iterator[tuple[int, str]]:
    """For each operand with values that are not finite: their first step, and a sentence."""
    for kind, rows in (run.stats or {}).items():
        bad = [row for row in rows if not row.finite]
        if not bad:
            continue
        step = min(row.step for row in bad)
        # Anomalies are in the order of the casts. Rows are in the order of the layers.
        named = [
            row["fqn"]
            for row in run.anomalies or ()
            if (row["step"], row["what"], row["operand"]) == (step, "non-finite", kind.what)
        ]
        fqn = [*named, *(row.fqn for row in bad if row.step == step)][0]
        others = len({row.fqn for row in bad}) - 1
        more = f", and then or later in {others} other layer{'s' * (others > 1)}" if others else ""
        where = f"{fqn or 'the model'} at step {step}{more}"
        yield step, f"The first values that are not finite in the {kind.label}: {where}."


def steps_text(steps: list[int]) -> str:
    """Some steps, in words."""
    return f"step {steps[0]}" + (f" and {len(steps) - 1} later" if len(steps) > 1 else "")


def collectives(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of comm.json summed over modules, each with its modules and share of all bytes."""
    total = sum(row["bytes"] for row in rows) or 1
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("op", "axis", "dtype", "in_mixed_gather"))
        groups.setdefault(key, []).append(row)
    return [
        {
            "op": op,
            "axis": axis,
            "dtype": dtype.removeprefix("torch."),
            "in_mixed_gather": mixed,
            "count": sum(row["count"] for row in group),
            "elements": sum(row["elements"] for row in group),
            "bytes": sum(row["bytes"] for row in group),
            "float8": any(row["float8_bytes"] for row in group),
            "share": sum(row["bytes"] for row in group) / total,
            "seconds": sum(row["seconds"] or 0.0 for row in group),
            "modules": group,
        }
        for (op, axis, dtype, mixed), group in groups.items()
    ]


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
    if out.is_dir():
        parser.error(f"{out} is a folder: name a file")
    try:
        run = read_run(args.run)
        write(out, render(run))
    except NoRun as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{out} could not be written: {error.strerror or error}")
    for note in run.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
