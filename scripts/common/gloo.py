"""gloo process groups that run one collective at a time.

By default two threads run the collectives of a group. In torch 2.13 both write the name of the
completed collective to one string of the group, without a lock (``lastCompletedWorkName`` in
``ProcessGroupGloo::runLoop``). If two collectives of a group end at the same moment, one thread may
free the characters that the other is writing. That corrupts the heap, and the process dies a little
later (in 3 of 33 trainings on 4 ranks, with FSDP2 x TP and overlapping collectives). torch has no
option for the number of threads of the groups that it makes for meshes, so their class is replaced
here. NCCL has no such threads.

By default each group also has its own device, with a thread that polls its sockets 100 times a
second. Here the groups of a process share one device. Otherwise idle ranks with the groups of many
meshes would take much of the time of a few cores.

Groups of meshes outlive ``destroy_process_group``. Their threads may abort the process while the
interpreter is finalized ("terminate called without an active exception"): a thread that still holds
a tensor waits for the GIL, which is no longer handed out (pytorch/pytorch issue 190489). ``leave``
avoids this: it skips finalization.
"""

import functools
import os
import sys
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d


class _OneThread(dist.ProcessGroupGloo):
    """A gloo group whose collectives run one after the other, in the order of the calls."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, **since_2_15: bool
    ) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._threads = 1
        options._timeout = timeout
        for name, value in since_2_15.items():  # enable_reconfigure
            setattr(options, name, value)
        options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME", ""), os.getpid())
        super().__init__(store, rank, size, options)  # type: ignore[arg-type]


@functools.cache
def _devices(interfaces: str, process: int) -> list[Any]:
    """One device per interface, or the default one. Cached per process: forks lack its threads."""
    gloo = dist.ProcessGroupGloo
    names = [name for name in interfaces.split(",") if name]
    return [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]


def use_one_thread_per_group() -> None:
    """Make all gloo groups that this process creates from now on use one thread each."""
    distributed_c10d.ProcessGroupGloo = _OneThread  # type: ignore[misc]


def leave(status: int = 0) -> NoReturn:
    """End this process without finalizing the interpreter. ``atexit`` handlers do not run."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
