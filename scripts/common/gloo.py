"""Process groups of gloo that run one collective at a time.

By default each group has two threads that run its collectives. In torch 2.13 both write the name of
what they completed into one string of the group, without a lock (``lastCompletedWorkName`` in
``ProcessGroupGloo::runLoop``). Where two collectives of a group end at the same moment, one
thread may free the characters that the other writes: the heap is damaged, and the process dies a
little later. It was seen in 3 of 33 trainings on 4 ranks, with FSDP2 x TP and overlapping
collectives. torch offers no option for the number of threads of the groups that it makes for
meshes, so that its constructor is replaced here. NCCL has no such threads.

Each group by default also has a device of its own, with a thread that waits for its sockets and
wakes up 100 times a second. The groups of a process share one here: idle ranks that keep the groups
of many meshes would take a good part of few cores.

The threads of a group that outlives ``destroy_process_group``, as those of meshes do, may abort the
process while the interpreter is finalized, with "terminate called without an active exception":
such a thread still holds a tensor, and asks for the lock of an interpreter that gives it no more
(pytorch/pytorch issue 190489). ``leave`` ends a process without that.
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
    """One device per interface, or the default one; a forked process has none of its threads."""
    gloo = dist.ProcessGroupGloo
    names = [name for name in interfaces.split(",") if name]
    return [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]


def use_one_thread_per_group() -> None:
    """Give the gloo groups that this process makes from now on one thread each."""
    distributed_c10d.ProcessGroupGloo = _OneThread  # type: ignore[misc]


def leave(status: int = 0) -> NoReturn:
    """End this process without finalizing the interpreter. Functions of ``atexit`` do not run."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
