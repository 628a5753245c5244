"""Run tests as a stage of `scripts.bench.gpu_day`: append a JSON line as soon as a test ends.

    python -m scripts.bench.gpu_tests tests/gpu --workers 8

A test that crashes its process, or waits too long for the device, ends a worker of pytest-xdist
(tests/gpu/conftest.py), which is then replaced by a new one.
"""

import tempfile
import time
from pathlib import Path

import pytest

from scripts.bench.gpu_results import FAILED, Result, add_options, append, card, commit
from scripts.common.options import command_parser, positive


class Lines:
    """A pytest plugin that appends results.

    Args:
        stage: the name of the stage in the results.
        results, begun: the files to append to, if any.
    """

    def __init__(self, stage: str, results: Path | None, begun: Path | None) -> None:
        self.identity = {"stage": stage, "card": card(), "commit": commit()}
        self.results = results
        self.begun = begun

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.begun:
            with self.begun.open("a") as file:
                file.write(f"{nodeid}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        error, note = "", ""
        if report.skipped:
            note = "skipped"
        elif report.failed:
            text = report.longreprtext
            said = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
            error = " ".join(said[:2])[:300] or next(reversed(text.splitlines()), "failed")
        result = Result(
            name=report.nodeid,
            readings=(report.duration,),
            note=note,
            error=error,
            at=time.time(),
            **self.identity,
        )
        if self.results:
            append(self.results, result)


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("scripts.bench.gpu_tests", __doc__)
    parser.add_argument("paths", nargs="+", help="of tests")
    parser.add_argument("--ignore", nargs="+", default=[], metavar="PATH", help="of other tests")
    parser.add_argument("--workers", type=positive, default=1, help="processes; %(default)s")
    add_options(parser, "tests")
    args = parser.parse_args(argv)
    chosen = [*args.paths, *(f"--ignore={path}" for path in args.ignore)]
    resumed = bool(args.begun and args.begun.exists())
    if resumed:  # leave out tests that an earlier process has begun
        chosen += [f"--deselect={name}" for name in args.begun.read_text().splitlines()]
    options = ["-q", "--tb=short", "-p", "no:cacheprovider"]
    options += ["-n", str(args.workers), "--max-worker-restart=1000", "--dist=load"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(chosen))
        file.flush()
        status = pytest.main(
            [*options, f"@{file.name}"], plugins=[Lines(args.stage, args.results, args.begun)]
        )
    if status == pytest.ExitCode.TESTS_FAILED:
        return FAILED
    nothing_left = resumed and status == pytest.ExitCode.NO_TESTS_COLLECTED
    return 0 if nothing_left else int(status)


if __name__ == "__main__":
    raise SystemExit(main())
