"""Tests on GPUs. Tests on several GPUs use functions in tests/distributed."""

import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "distributed"))

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
LIMIT = 200.0  # seconds per test; some tests start ranks


@pytest.fixture(autouse=True)
def device_answers() -> Iterator[None]:
    """End a worker whose device no longer answers, because all later tests would fail in it.

    pytest-xdist then starts a new one. Without pytest-xdist, this does nothing.
    """
    if IS_WORKER:
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)
    yield
    if IS_WORKER:
        faulthandler.cancel_dump_traceback_later()
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception:  # torch.AcceleratorError, for any device error
            os._exit(1)
