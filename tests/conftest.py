"""What every test gets: a fixed seed, one thread, the pools of ranks, the markers of GPUs."""

import gc
import os
import sys
from collections.abc import Iterator
from getpass import getuser
from pathlib import Path
from tempfile import gettempdir

# Before torch is imported, here and in the ranks that inherit it: tests compare bits, and
# the ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Each process would compile and load a test program for each vector extension of this CPU.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# torch's cache of compiled graphs does not know this variable: with it, graphs whose loops are made
# for AVX-512 would be compiled for AVX2, and give other values.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    folder = Path(gettempdir()) / f"torchinductor_{getuser()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
# torch raises there what it only warns of elsewhere: operators whose outputs share memory.
os.environ.setdefault("CI", "1")

import pytest
import torch

# Before Triton is imported: where there is no GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch.distributed as dist
from ranks import RankPools
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

SCRIPTS = Path(__file__).parent / "scripts"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` or `gpus(n)`, where there are too few. Programs are marked `full`.

    (The only other skips are those of tests in a browser, where there is none.)
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
    """One thread; and the garbage collector need not look at what modules have made."""
    torch.set_num_threads(1)
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh() -> None:
    """The same seed; and no code that others compiled, of which dynamo keeps eight per function."""
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """`ranks(world_size)` is a `ranks.RankPool`; the same one for all tests of the session."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def fake_world() -> Iterator[DeviceMesh]:
    """A dp x tp mesh of 2 x 4 ranks in one process; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@pytest.fixture
def fake_tp(fake_world: DeviceMesh) -> DeviceMesh:
    """A mesh of 2 such ranks."""
    return fake_world["dp"]
