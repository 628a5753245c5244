"""Programs that tests start leave no processes behind."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
from processes import ending_all

CHILD = """
import os, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
time.sleep(1000)
"""
# Like torchrun's ranks, the child leads its own session.
PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True)
"""


def test_a_program_that_has_ended_leaves_no_child(tmp_path: Path) -> None:
    """The child can't be found by its parent, and keeps the output pipes open."""
    path, deadline = tmp_path / "child", time.monotonic() + 120
    with ending_all() as env:
        subprocess.run([sys.executable, "-c", PARENT, "-c", CHILD, str(path)], env=env, check=True)
        while not path.exists():
            assert time.monotonic() < deadline, "the child did not start"
            time.sleep(0.1)
        child = psutil.Process(int(path.read_text()))
    assert not child.is_running()
