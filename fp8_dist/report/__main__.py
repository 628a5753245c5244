"""A command that shows runs: ``python -m fp8_dist.report RUN...`` writes one HTML page.

A RUN is a folder that ``fp8_dist.report.RunWriter`` writes. Several runs are compared. A run may
still be going on. The page needs no network, no script and no other file.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv``, by default the process's arguments; return the exit status."""
    parser = argparse.ArgumentParser("python -m fp8_dist.report", allow_abbrev=False)
    parser.description = "Makes one HTML page of runs that fp8_dist.report.RunWriter wrote."
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", type=Path, help="the page; default: report.html in the first RUN")
    args = parser.parse_args(argv)
    if missing := [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]:
        parser.error(f'{" and ".join(missing)} must be installed: pip install "fp8-dist[report]"')
    page = importlib.import_module("fp8_dist.report.page")
    out = args.out or args.runs[0] / "report.html"
    try:
        headlines, notes = page.write(out, args.runs)
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror or error}")
    print(*headlines, f"written: {out}", sep="\n")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
