"""A command that shows runs: ``python -m fp8_dist.report RUN...`` writes one HTML page.

A RUN is a folder that ``fp8_dist.report.RunWriter`` writes; several are compared. The page needs no
network, no script and no other file. A run may still be going on: with ``--watch`` the page is
written again when something was appended, and a browser that shows it reloads it.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fp8_dist.report.data import FILES, NoRun

_NEEDED = ("jinja2", "matplotlib")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv``, by default the process's arguments; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fp8_dist.report",
        description="Makes one HTML page of runs that fp8_dist.report.RunWriter wrote.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", type=Path, help="the page; default: report.html in the first RUN")
    watch = "write the page again, and let browsers reload it, every so many seconds, until Ctrl-C"
    parser.add_argument("--watch", type=int, metavar="SECONDS", help=watch)
    args = parser.parse_args(argv)
    if args.watch is not None and args.watch < 1:
        parser.error("--watch must be at least 1")
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        parser.error(f'{" and ".join(missing)} must be installed: pip install "fp8-dist[report]"')
    page = importlib.import_module("fp8_dist.report.page")
    out = args.out or args.runs[0] / "report.html"
    try:
        notes = page.write(out, args.runs, args.watch)
        print(f"written: {out}", flush=True)
        if args.watch is not None:
            notes = _watch(page, out, args.runs, args.watch)
    except NoRun as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror or error}")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _watch(page: Any, out: Path, runs: list[Path], seconds: int) -> list[str]:
    """Write the page again after each change, until Ctrl-C; then once more, without reloading."""

    def state() -> list[tuple[int, int]]:
        files = [run / name for run in runs for name in FILES]
        found = [file.stat() for file in files if file.is_file()]
        return [(stat.st_mtime_ns, stat.st_size) for stat in found]

    written = None
    try:
        while True:
            if (now := state()) != written:
                with suppress(NoRun, FileNotFoundError):  # a run that starts again
                    page.write(out, runs, seconds)
                written = now
            time.sleep(seconds)
    except KeyboardInterrupt:
        notes: list[str] = page.write(out, runs)
        return notes


if __name__ == "__main__":
    sys.exit(main())
