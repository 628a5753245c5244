"""The faults of scripts.measure.mutations."""

import pytest

from scripts.measure.mutations import FAULTS, ROOT, planted, problem, read_faults


def test_a_patch() -> None:
    (fault,) = read_faults("a.py: wrong sign\n  def f(x):\n-     return x\n+     return -x\nt.py\n")
    assert planted("def f(x):\n    return x\n", fault) == "def f(x):\n    return -x\n"
    with pytest.raises(ValueError, match="2 times"):
        planted("def f(x):\n    return x\n" * 2, fault)


def test_each_fault_can_be_planted() -> None:
    """Also, the test that must catch a fault exists."""
    faults = read_faults(FAULTS.read_text())
    assert [reason for reason in map(problem, faults) if reason] == []
    for fault in faults:
        path, _, name = fault.test.partition("::")
        function = f"def {name.partition('[')[0]}(" if name else ""
        assert function in (ROOT / path).read_text(), fault
