"""Programs that tests start, and that leave no process behind.

``subprocess.run`` ends the program alone when its time is up. torchrun's ranks have sessions of
their own: they would stay, and wait for each other.
"""

import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

# Every process inherits it, whoever starts it, and keeps it when its parent has died.
MARK = "FP8_DIST_TEST_RUN"


@contextmanager
def ending_all(environment: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """An environment. Whatever was started in it has ended, or is killed, when the block ends."""
    mark = uuid.uuid4().hex
    try:
        yield {**(os.environ if environment is None else environment), MARK: mark}
    finally:
        while left := _marked(mark):  # killed ones may have started others meanwhile
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
    """``subprocess.run`` that captures text, and ends every process when the time is up."""
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
