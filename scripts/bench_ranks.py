"""Runs a benchmark's function on ranks of this machine, and brings back what rank 0 returns."""

import argparse
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

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def run_on_ranks(
    world_size: int, args: argparse.Namespace, function: Callable[..., Any], *arguments: Any
) -> Any:
    """Calls ``function(*arguments)`` on each rank of a default process group.

    Args:
        world_size: how many ranks. Under torchrun they are there already; elsewhere they are
            spawned, one too: DTensor remembers meshes whose group is gone.
        args: what `benchmarks.start` returned: device and threads.
        function: at the top level of an importable module.
        arguments: can be pickled.

    Returns:
        What rank 0 returns; None on the other ranks of a torchrun.

    Raises:
        ValueError: there are too few GPUs, or torchrun started another number of ranks.
    """
    gpus = torch.cuda.device_count()
    if args.device.type == "cuda" and world_size > gpus:
        raise ValueError(f"{world_size} ranks need as many GPUs, there are {gpus}: --device cpu")
    if "RANK" in os.environ:
        if int(os.environ["WORLD_SIZE"]) != world_size:
            raise ValueError(f"{world_size} ranks are needed, torchrun started another number")
        dist.init_process_group(_backend(args.device.type))
        return _call(dist.get_rank(), args.device.type, function, arguments)
    # Ranks share the machine, and gloo needs an address that it can reach.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    with tempfile.TemporaryDirectory() as folder:
        task = (world_size, folder, args.device.type, args.threads, function, arguments)
        multiprocessing.spawn(_rank_main, task, nprocs=world_size)
        return pickle.loads(_answer(folder).read_bytes())


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    device: str,
    threads: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(threads)
    tqdm.set_lock(RLock())  # its own, between processes, would be left behind at the end below
    _bind(rank, world_size)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(_backend(device), store=store, rank=rank, world_size=world_size)
    result = _call(rank, device, function, arguments)
    if rank == 0:
        _answer(folder).write_bytes(pickle.dumps(result))
    # Without the interpreter's end. A thread of gloo may still hold the last tensor, and lets go of
    # it when it gets its turn; one that asks for the interpreter during its end aborts the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _bind(rank: int, world_size: int) -> None:
    """Keeps a rank and its threads on cores of its own (ranks take turns where there are too few).

    As ``torchrun --numa-binding`` does with nodes: the scheduler would move the ranks that wait for
    a collective onto each other's cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        return  # there is none but on Linux
    cores = sorted(os.sched_getaffinity(0))
    shares = min(world_size, len(cores))
    share = rank % shares
    own = cores[share * len(cores) // shares : (share + 1) * len(cores) // shares]
    os.sched_setaffinity(0, own)


def _call(rank: int, device: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.manual_seed(0)
    try:
        result = function(*arguments)
        dist.barrier()  # gloo may abort a rank that leaves while others still talk to it
    finally:
        dist.destroy_process_group()
    return result if rank == 0 else None


def _backend(device: str) -> str:
    return "nccl" if device == "cuda" else "gloo"


def _answer(folder: str) -> Path:
    return Path(folder) / "answer"
