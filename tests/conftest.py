"""What every test gets: a fixed seed, one thread, the pools of ranks, the `gpu` marker."""

import os
from collections.abc import Iterator

# Before torch is imported, here and in the ranks that inherit it: tests compare bits, and
# the ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

# Before Triton is imported: where there is no GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from ranks import RankPools


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The only permitted skip: tests marked `gpu`, where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """`ranks(world_size)` is a `ranks.RankPool`; the same one for all tests of the session."""
    pools = RankPools()
    yield pools
    pools.close()
