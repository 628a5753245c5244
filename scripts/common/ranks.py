"""Run a function on several ranks of this machine."""

import faulthandler
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from tqdm import tqdm

from scripts.common.gloo import leave, use_one_thread_per_group

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def run_on_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    device: str = "cpu",
    threads: int = 1,
    shared_gpu: bool = False,
) -> list[Any]:
    """Call ``function(*arguments)`` on newly started ranks, and return the results by rank.

    The default process group is gloo on "cpu", with separate cores for each rank, and NCCL on
    "cuda", with one GPU per rank. With `shared_gpu` all ranks use the first GPU. NCCL refuses that,
    so the group is then gloo, which copies GPU tensors to the CPU and back. `function` must be at
    the top level of a module, and arguments and results must pickle.

    Raises:
        ValueError: there are too few GPUs, or `shared_gpu` is set for another device than "cuda".
        torch.multiprocessing.ProcessRaisedException: a rank raised; the text has the traceback.
    """
    if shared_gpu and device != "cuda":
        raise ValueError(f"ranks on {device!r} share no GPU: leave out shared_gpu=True")
    needed = 1 if shared_gpu else world_size
    if device == "cuda" and needed > torch.cuda.device_count():
        raise ValueError(
            f"{world_size} ranks need {'a GPU' if shared_gpu else 'as many GPUs'}, there are "
            f"{torch.cuda.device_count()}: use --device cpu"
        )
    # gloo needs an address that it can reach. The ranks share a machine, so loopback will do.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # Forks of a server that has imported torch start faster, but can't use CUDA.
    method = "spawn" if device == "cuda" or sys.platform == "darwin" else "forkserver"
    preloaded = ["torch._dynamo", "scripts.common.models", "scripts.train.train_run"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preloaded)
    with tempfile.TemporaryDirectory() as folder:
        where = (device, shared_gpu, threads)
        task = (world_size, folder, *where, dict(os.environ), function, arguments)
        multiprocessing.start_processes(_rank_main, task, world_size, start_method=method)
        return [pickle.loads(_answer(folder, r).read_bytes()) for r in range(world_size)]


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    device: str,
    shared_gpu: bool,
    threads: int,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= environment  # the fork server's may be older
    faulthandler.enable()  # print a traceback on a fatal signal
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    tqdm.set_lock(RLock())  # leave() would leak the semaphore that tqdm uses by default
    if device == "cuda":
        torch.cuda.set_device(0 if shared_gpu else rank)
    else:
        _bind(rank, world_size)
    use_one_thread_per_group()
    store = dist.FileStore(f"{folder}/store", world_size)
    options: dict[str, Any] = {"backend": "gloo"}
    if shared_gpu:
        # With the backend "gloo" alone, meshes would not use the default group, but make another.
        options = {"backend": "cpu:gloo,cuda:gloo"}
    elif device == "cuda":
        options = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
    dist.init_process_group(store=store, rank=rank, world_size=world_size, **options)
    try:
        result = function(*arguments)
        dist.barrier()  # gloo may abort a rank that leaves while others still talk to it
    finally:
        dist.destroy_process_group()
    _answer(folder, rank).write_bytes(pickle.dumps(result))
    leave()


def _bind(rank: int, world_size: int) -> None:
    """Pin a rank and its threads to its own cores. If there are too few cores, ranks share them.

    Otherwise the scheduler moves ranks that wait for a collective onto each other's cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        return  # Linux only
    cores = sorted(os.sched_getaffinity(0))
    shares = min(world_size, len(cores))
    share = rank % shares
    os.sched_setaffinity(
        0, cores[share * len(cores) // shares : (share + 1) * len(cores) // shares]
    )


def _answer(folder: str, rank: int) -> Path:
    return Path(folder) / f"answer_{rank}"
