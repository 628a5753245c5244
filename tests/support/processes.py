"""Run programs in tests without leaving processes behind.

On a timeout ``subprocess.run`` kills only the program itself. torchrun's ranks have their own
sessions, so they would stay and wait for each other.
"""

import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

# An environment variable that every descendant inherits, and keeps after its parent has died.
MARK = "FP8_DIST_TEST_RUN"


@contextmanager
def ending_all(environment: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Yield an environment, and at the end of the block kill all processes that still have it."""
    mark = uuid.uuid4().hex
    try:
        yield {**(os.environ if environment is None else environment), MARK: mark}
    finally:
        while left := _marked(mark):  # processes may start others before they are killed
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=10)


def run(
    command: Sequence[str | Path],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Like ``subprocess.run`` with captured text, but kill all descendants at the end."""
    with ending_all(env) as environment:
        return subprocess.run(
            command,
            timeout=timeout,
            env=environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:  # ended, or someone else's
            continue
    return found
