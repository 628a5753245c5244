"""The faults of scripts.measure.mutations can be planted, and the tests that must fail exist."""

import subprocess
import sys

import pytest

from scripts.measure.mutations import FAULTS, ROOT, planted, read_faults


def test_faults_apply_and_their_tests_exist() -> None:
    faults = read_faults(FAULTS.read_text())
    assert len({fault.what for fault in faults}) == len(faults) >= 60
    for fault in faults:
        source = (ROOT / fault.file).read_text()
        changed = planted(source, fault)
        assert changed != source, fault.what
        compile(changed, fault.file, "exec")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not full"]
    tests = {fault.test for fault in faults}
    done = subprocess.run([*command, *tests], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for test in tests:
        assert test in done.stdout, f"{test} is not in the ten-minute tier"


def test_a_patch() -> None:
    (fault,) = read_faults("a.py: wrong sign\n  def f(x):\n-     return x\n+     return -x\nt.py\n")
    assert planted("def f(x):\n    return x\n", fault) == "def f(x):\n    return -x\n"
    with pytest.raises(ValueError, match="2 times"):
        planted("def f(x):\n    return x\n" * 2, fault)
