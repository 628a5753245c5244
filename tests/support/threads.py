"""Ranks that are threads of this process, so that several of them can share one GPU.

NCCL takes one rank per GPU. In torch's process groups between threads a rank's collective copies
the tensors of all ranks, on streams that don't know of each other: so every rank waits for the
device before and after it. (What depends on streams is not tested by such ranks.)
"""

import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg

_meshes = threading.local()


def threads_mesh(device: str, **axes: int) -> DeviceMesh:
    """The mesh with these axes; called on a rank. A rank makes each of its meshes once."""
    key = str(axes)
    if not hasattr(_meshes, key):
        mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
        setattr(_meshes, key, mesh)
    found: DeviceMesh = getattr(_meshes, key)
    return found


class ThreadedRanks:
    """`world_size` threads with a process group; they live until `close`.

    (New threads would get the numbers of old ones, and DTensor's caches tell meshes apart by the
    numbers of their threads.)
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._tasks: list[queue.Queue[Any]] = [queue.Queue() for _ in range(world_size)]
        self._answers: queue.Queue[tuple[int, Any, str]] = queue.Queue()
        self._store = dist.HashStore()
        for rank in range(world_size):
            threading.Thread(target=self._main, args=(rank,), daemon=True).start()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls `fn(*args)` on every rank and returns the results, by rank.

        Raises RuntimeError with the tracebacks of all ranks that failed.
        """
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._install_threaded_pg()
        _set_thread_isolation_mode(True)
        try:
            with patch.object(multi_threaded_pg.Collective, "join", _synchronized_join):
                for tasks in self._tasks:
                    tasks.put((fn, args))
                answers = sorted(self._answers.get(timeout=120) for _ in self._tasks)
        finally:
            _set_thread_isolation_mode(False)
            multi_threaded_pg._uninstall_threaded_pg()
        if failures := [f"--- rank {rank} ---\n{text}" for rank, _, text in answers if text]:
            raise RuntimeError("\n".join(failures))
        return [result for _, result, _ in answers]

    def close(self) -> None:
        """Ends the threads."""
        for tasks in self._tasks:
            tasks.put(None)

    def _main(self, rank: int) -> None:
        while (task := self._tasks[rank].get()) is not None:
            fn, args = task
            result, failure = None, ""
            try:
                if not dist.is_initialized():
                    dist.init_process_group(
                        "threaded", rank=rank, world_size=self.world_size, store=self._store
                    )
                result = fn(*args)
            except BaseException as error:
                failure = traceback.format_exc()
                multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
            self._answers.put((rank, result, failure))


_join = multi_threaded_pg.Collective.join


def _synchronized_join(self: Any, rank: int, data: Any) -> Any:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    done = _join(self, rank, data)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return done
