"""A rank that raises ends at once, also while an all-reduce is under way that nobody joins."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import ending_all

GROUP_TIMEOUT_S = 100  # a rank that waits for the other one would need as long

PROGRAM = f"""
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from fp8_dist import (
    Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale,
)

store, rank, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
timeout = timedelta(seconds={GROUP_TIMEOUT_S})
dist.init_process_group(
    "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timeout
)
config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
net = convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(32, 32)), config=config)
fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
precompute_float8_dynamic_scale(net)
net(torch.ones(2, 32)).sum().backward()
if rank == 1 and how == "raises":
    time.sleep({GROUP_TIMEOUT_S})
precompute_float8_dynamic_scale(net)
print("reached the end", flush=True)
if how == "raises":
    raise RuntimeError("this rank fails")
"""


def start(folder: Path, rank: int, how: str, env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder / "store"), str(rank), how]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env)


@pytest.mark.full
def test_a_rank_that_raises_does_not_wait_for_the_others(tmp_path: Path) -> None:
    with ending_all() as env:
        failing, other = (start(tmp_path, rank, "raises", env) for rank in (0, 1))
        assert failing.stdout is not None
        assert failing.stdout.readline() == "reached the end\n"
        raised_at = time.monotonic()
        error = failing.communicate(timeout=GROUP_TIMEOUT_S)[1]
        assert time.monotonic() - raised_at < GROUP_TIMEOUT_S / 4
        assert other.poll() is None, "the other rank ended: nothing was left to wait for"
    other.communicate()
    assert failing.returncode == 1
    assert "RuntimeError: this rank fails" in error


@pytest.mark.full
def test_a_program_that_ends_well_waits(tmp_path: Path) -> None:
    """Torch warns of a collective that nobody waited for."""
    with ending_all() as env:
        for process in [start(tmp_path, rank, "ends well", env) for rank in (0, 1)]:
            error = process.communicate(timeout=GROUP_TIMEOUT_S)[1]
            assert process.returncode == 0
            assert "unwaited" not in error
