"""The stage that runs tests/gpu: each test is a result as soon as it ends."""

import os
import time
from typing import Any

import pytest

from scripts.prove.results import ROOT, Result, Worker, append, card
from scripts.prove.runner import Place


class Lines:
    """A pytest plugin that appends the names of tests that begin, and results."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.card = worker, card()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        with self.worker.begun.open("a") as file:
            file.write(f"{nodeid}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        about: Any = {"name": report.nodeid, "card": self.card, "readings": (report.duration,)}
        if report.failed:
            text = report.longreprtext
            said = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
            about["error"] = " ".join(said[:2])[:300] or ["failed", *text.splitlines()][-1]
        note = "skipped" * report.skipped
        append(self.worker.results, Result(self.worker.stage, note=note, at=time.time(), **about))


def run(worker: Worker, place: Place) -> None:
    """Run the tests that earlier processes have not begun, in processes of pytest-xdist.

    A test that crashes its process, or waits too long for the device, ends one of them
    (tests/gpu/conftest.py), which is then replaced.
    """
    options = f"{ROOT}/tests/gpu --rootdir={ROOT} -q --tb=short -p no:cacheprovider".split()
    options += ["-n", str(min(12, os.cpu_count() or 1)), "--max-worker-restart=1000"]
    options += [f"--deselect={name}" for name in sorted(worker.skipped)]
    status = pytest.main(options, plugins=[Lines(worker)])
    nothing = status == pytest.ExitCode.NO_TESTS_COLLECTED and worker.skipped
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not nothing:
        raise RuntimeError(f"pytest ended with {status!r}")
