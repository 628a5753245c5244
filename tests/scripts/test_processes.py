"""Programs that tests start leave no process behind, torchrun's ranks included."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from processes import ending_all

RANK = """
import os, pathlib, sys, time
path = pathlib.Path(sys.argv[1], os.environ["RANK"])
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
time.sleep(1000)
"""
# What a rank is when torchrun starts it: the leader of a session of its own.
STARTS_A_SESSION = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True, env={**os.environ, "RANK": "0"})
if os.environ.get("ENDS") is None:
    time.sleep(1000)
"""


def started(folder: Path, ranks: int) -> list[psutil.Process]:
    """The ranks, once all have started."""
    deadline = time.monotonic() + 120
    while not all((folder / str(rank)).exists() for rank in range(ranks)):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.1)
    return [psutil.Process(int((folder / str(rank)).read_text())) for rank in range(ranks)]


def test_torchrun_leaves_no_rank_behind(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node=2", str(tmp_path / "rank.py"), str(tmp_path)]
    with suppress(subprocess.TimeoutExpired), ending_all() as env:
        torchrun = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
        ranks = started(tmp_path, 2)
        torchrun.wait(timeout=0)
    torchrun.wait()
    assert [rank.is_running() for rank in ranks] == [False, False]


def test_nor_does_a_program_that_has_ended(tmp_path: Path) -> None:
    """Whose child holds the pipes that its output is read from: it can't be found by its parent."""
    command = [sys.executable, "-c", STARTS_A_SESSION, "-c", RANK, str(tmp_path)]
    with ending_all() as env:
        subprocess.run(command, env={**env, "ENDS": "1"}, check=True)
        ranks = started(tmp_path, 1)
    assert [rank.is_running() for rank in ranks] == [False]
