"""The patches of scripts.measure.mutations."""

import pytest

from scripts.measure.mutations import planted, read_faults


def test_a_patch() -> None:
    (fault,) = read_faults("a.py: wrong sign\n  def f(x):\n-     return x\n+     return -x\nt.py\n")
    assert planted("def f(x):\n    return x\n", fault) == "def f(x):\n    return -x\n"
    with pytest.raises(ValueError, match="2 times"):
        planted("def f(x):\n    return x\n" * 2, fault)
