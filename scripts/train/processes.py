"""The processes of a training run: which device each has, and how they join."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from scripts.common.gloo import set_default_timeout, use_one_thread_per_group


def choose_device(local_rank: int, local_ranks: int) -> tuple[torch.device, str]:
    """Returns this rank's device and, where GPUs are left unused, the reason ("" otherwise).

    Ranks that share a GPU cannot form an NCCL group: they all train on the CPU instead.
    """
    gpus = torch.cuda.device_count()
    if local_ranks <= gpus:
        return torch.device("cuda", local_rank), ""
    reason = f"{local_ranks} ranks need as many GPUs, this machine has {gpus}" if gpus else ""
    return torch.device("cpu"), reason


@contextmanager
def process_group(timeout_s: float) -> Iterator[tuple[torch.device, str]]:
    """Joins the ranks that torchrun started, or makes a world of one; yields `choose_device`."""
    device, reason = choose_device(
        int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )
    use_cuda = device.type == "cuda"
    if use_cuda:
        torch.cuda.set_device(device)
    use_one_thread_per_group()
    set_default_timeout(timeout_s)
    timeout = timedelta(seconds=timeout_s)
    store, rank, ranks = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
        # torchrun keeps one store for all its restarts: without a prefix for each attempt gloo
        # would connect to the addresses of ranks that are gone.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt/{attempt}", store)
    backend = "nccl" if use_cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    yield device, reason
    # gloo may abort a rank's last collective if another rank leaves first.
    dist.barrier()
    dist.destroy_process_group()
