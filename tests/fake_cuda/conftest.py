"""Fixtures of the tests on the fake CUDA device."""

from collections.abc import Iterator

import pytest
from fake_cuda.process import FakeCudaProcess


@pytest.fixture(scope="session")
def fake_cuda() -> Iterator[FakeCudaProcess]:
    """`fake_cuda.run(f, *args)` calls a function where torch has a CUDA device."""
    with FakeCudaProcess() as process:
        yield process
