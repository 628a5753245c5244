"""The processes of a training run: which device each has, and how they join."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from scripts.common.gloo import set_default_timeout, use_one_thread_per_group
from scripts.train.roll import Roll, rendezvous


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
def process_group(timeout_s: float) -> Iterator[tuple[torch.device, str, Roll | None]]:
    """Joins the ranks that torchrun started, or makes a world of one.

    Yields:
        `choose_device`, and the roll of the ranks; None without torchrun.

    Raises:
        MissingRank: ranks did not start in time.
    """
    device, reason = choose_device(
        int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )
    use_cuda = device.type == "cuda"
    if use_cuda:
        torch.cuda.set_device(device)
    use_one_thread_per_group()
    set_default_timeout(timeout_s)
    backend, roll = "nccl" if use_cuda else "gloo", None
    store, rank, ranks = dist.HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, ranks = rendezvous(timeout_s)
        roll = Roll(store, rank, ranks)
        roll.call(timeout_s)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    yield device, reason, roll
    # gloo may abort a rank's last collective if another rank leaves first.
    dist.barrier()
    dist.destroy_process_group()
