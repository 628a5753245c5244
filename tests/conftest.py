"""Fixtures and settings for all tests: a fixed seed, one thread, pools of ranks, GPU markers."""

import gc
import os
import sys
from collections.abc import Iterator
from getpass import getuser
from pathlib import Path
from tempfile import gettempdir

# Set before torch is imported, also for ranks, which inherit it: tests compare bits, and ranks
# share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Otherwise each process would compile and load a test program per vector extension of this CPU.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# torch's cache of compiled graphs ignores this variable. Without a cache of its own, graphs with
# loops for AVX-512 would be compiled for AVX2, and have different results.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    folder = Path(gettempdir()) / f"torchinductor_{getuser()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
# With CI set, torch raises an error, not just a warning, if outputs of an operator share memory.
os.environ.setdefault("CI", "1")

import pytest
import torch

# Set before Triton is imported: without a GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch.distributed as dist
from ranks import RankPools
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

SCRIPTS = Path(__file__).parent / "scripts"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` or `gpus(n)` if GPUs are missing. Mark tests of scripts as `full`.

    (The only other skips are tests in a browser, if there is none.)
    """
    devices = torch.cuda.device_count()
    for item in items:
        if SCRIPTS in item.path.parents:
            item.add_marker(pytest.mark.full)
        several = item.get_closest_marker("gpus")
        needed = several.args[0] if several else int(item.get_closest_marker("gpu") is not None)
        if devices < needed:
            reason = f"needs {needed} CUDA devices" if needed > 1 else "needs a CUDA device"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def quick_process() -> None:
    """Use one thread, and exclude the objects of modules from garbage collection."""
    torch.set_num_threads(1)
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Set the seed, and drop code compiled in other tests: dynamo keeps only eight per function."""
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """Pools by size: `ranks(world_size)` is a `ranks.RankPool`, shared by all tests."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def fake_world() -> Iterator[DeviceMesh]:
    """A dp x tp mesh of 2 x 4 ranks in one process, with collectives that do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@pytest.fixture
def fake_tp(fake_world: DeviceMesh) -> DeviceMesh:
    """A mesh of two of these ranks."""
    return fake_world["dp"]
