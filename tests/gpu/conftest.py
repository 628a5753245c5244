"""Tests on GPUs: those on several run functions of tests/distributed."""

import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "distributed"))

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
LIMIT = 200.0  # seconds for a test, some of which start ranks


@pytest.fixture(autouse=True)
def device_answers() -> Iterator[None]:
    """End a worker whose device answers no more: all other tests would fail there.

    pytest-xdist starts another one. Within one process there is nothing to go on with.
    """
    if IS_WORKER:
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)
    yield
    if IS_WORKER:
        faulthandler.cancel_dump_traceback_later()
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception:  # torch.AcceleratorError, of any device error
            os._exit(1)
