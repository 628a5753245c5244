"""A pool of gloo ranks that stays alive between tests. Ranks are forked from a server process that
has imported torch, so a new pool starts in a fraction of a second.

Vocabulary: a *rank* is a process in the default process group; a *task* is one call of a
module-level function on every rank. If a task fails on any rank, its pool is killed at once, and
restarted at its next use, because its ranks may have left a collective at different places.

    def gathered(width):                      # in a test module, at its top level
        mesh = device_mesh(tp=2)
        ...
        return tensor                         # plain data or plain CPU tensors

    def test_gathered(ranks):
        first, second = ranks(2).run(gathered, 64)
"""

import atexit
import faulthandler
import functools
import gc
import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map_only

from scripts.common.gloo import use_one_thread_per_group

# Time to import torch on a busy machine with few cores.
START_TIMEOUT_S = 180.0
# Timeout of a collective that some rank never joins; shorter than the parent's.
GROUP_TIMEOUT_S = 60.0
# Time that other ranks get after one has failed. Most of them are waiting for it.
GRACE_S = 3.0
# Forking a process that has imported torch is not safe on macOS.
START_METHOD = "spawn" if sys.platform == "darwin" else "forkserver"
# Imported once, before the ranks are forked.
PRELOADED = [
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._inductor.compile_fx",
    "fp8_dist.debug",
    "fp8_dist.fsdp",
    "fp8_dist.tensor_parallel",
]
# Also imported there if this process has imported them, as many test modules do.
PRELOADED_IF_USED = ["pytest", "nets", "hf_experts", "hf_models", "peft", "recorded_cases"]
# Pools may be used by several threads, and a start changes the environment.
_STARTING = threading.Lock()
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class RankError(RuntimeError):
    """At least one rank raised, died or did not answer; the text has every rank's report."""


@functools.cache
def device_mesh(**axes: int) -> DeviceMesh:
    """The mesh of default devices with the given axes, in this order; called on a rank.

    It is made once per pool, so tests with the same axes share process groups. (They are never
    destroyed: DTensor caches specs by mesh *equality*, so a spec from an earlier test may refer to
    the earlier mesh.)
    """
    device = torch.get_default_device().type
    return init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))


class RankPool:
    """`world_size` gloo ranks, started at the first `run` and reused until `close`."""

    def __init__(self, world_size: int, timeout: float = 150.0) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: Path | None = None
        self._settled = True  # whether the last task succeeded on every rank

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank, and return the results by rank.

        fn: a function at the top level of an importable module. Arguments and results are passed
            by value; tensors in results are detached. A DTensor can't be returned: return its
            `to_local()` or `full_tensor()`.
        timeout: seconds for this task, instead of the pool's timeout.

        If this raises RankError, the pool is restarted at the next call.
        """
        task = _pack((sys.path, fn, args, kwargs))
        if not self._processes:
            self._start()
        self._settled = False
        try:
            for connection in self._connections:
                connection.send_bytes(task)
            return self._collect(self.timeout if timeout is None else timeout)
        except OSError as error:  # a rank died while it was idle
            raise RankError(f"a rank is gone: {error}\n{self._exit_codes()}") from error
        finally:
            if not self._settled:
                self.close()

    def run_same(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `run`, check that all ranks return the same value, and return it."""
        first, *others = self.run(fn, *args, **kwargs)
        for rank, other in enumerate(others, start=1):
            assert other == first, f"rank {rank} has another result than rank 0"
        return first

    def close(self) -> None:
        """Kill the ranks, if there are any, and remove their files."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        context = multiprocessing.get_context(START_METHOD)
        used = [name for name in PRELOADED_IF_USED if name in sys.modules]
        context.set_forkserver_preload([*PRELOADED, *used])
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(rank, self.world_size, str(self._folder), theirs),
                daemon=True,
                name=f"rank {rank} of {self.world_size}",
            )
            # The first one starts the server, which must find the preloaded modules.
            with _STARTING, patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        try:
            self._collect(START_TIMEOUT_S)
        finally:
            if not self._settled:
                self.close()

    def _collect(self, timeout: float) -> list[Any]:
        """Receive the results of all ranks; set `_settled` if all succeeded."""
        self._settled = False
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        start, limit = time.monotonic(), timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, start + limit - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    good, answer = _unpack(connection.recv_bytes())
                except (EOFError, OSError):
                    good, answer = False, self._obituary(rank)
                (results if good else failures)[rank] = answer
                if not good:
                    limit = min(limit, time.monotonic() - start + GRACE_S)
        if waiting or failures:
            stacks = self._stacks(list(waiting.values()))
            raise RankError(_report(self.world_size, failures, stacks, time.monotonic() - start))
        self._settled = True
        return [results[rank] for rank in range(self.world_size)]

    def _obituary(self, rank: int) -> str:
        self._processes[rank].join(timeout=1.0)
        return f"the process ended, exit code {self._processes[rank].exitcode}"

    def _exit_codes(self) -> str:
        codes = {rank: process.exitcode for rank, process in enumerate(self._processes)}
        return "\n".join(f"rank {r}: exit code {c}" for r, c in codes.items() if c is not None)

    def _stacks(self, silent: list[int]) -> dict[int, str]:
        """The stacks of ranks that did not answer, from faulthandler."""
        for rank in silent:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if silent:
            time.sleep(0.3)  # the handler runs in C, even if Python is blocked
        assert self._folder is not None
        return {rank: _stack_file(self._folder, rank).read_text() for rank in silent}


class RankPools:
    """Pools by size: `pools(world_size)` is the pool of that size, started at its first use."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}
        atexit.register(self.close)

    def __call__(self, world_size: int) -> RankPool:
        return self._pools.setdefault(world_size, RankPool(world_size))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def _report(
    world_size: int, failures: dict[int, str], stacks: dict[int, str], seconds: float
) -> str:
    parts = []
    if failures:
        parts.append(f"failed on {_ranks(failures)} of {world_size}")
    if stacks:
        parts.append(f"no answer from {_ranks(stacks)} of {world_size} after {seconds:.1f} s")
    texts = failures | {rank: f"stopped here:\n{text}" for rank, text in stacks.items()}
    details = [f"--- rank {rank} ---\n{texts[rank].rstrip()}" for rank in sorted(texts)]
    return "\n".join(["; ".join(parts), *details])


def _ranks(ranks: dict[int, str]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack_{rank}"


def _pack(value: Any) -> bytes:
    """Serialize by value: with torch.multiprocessing's reductions, memory would be shared with a
    process that may have ended before it is read. (Plain pickle does not support float8.)"""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _rank_main(rank: int, world_size: int, folder: str, connection: Connection) -> None:
    """Run a rank: join the default group, then answer tasks until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    # Conversion and the garbage collector traverse all objects: exclude 400,000 of modules.
    gc.freeze()
    stacks = _stack_file(Path(folder), rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    torch.set_num_threads(1)
    use_one_thread_per_group()
    dist.init_process_group(
        "cpu:gloo",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    connection.send_bytes(_pack((True, None)))
    while True:
        try:
            task = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(task))


def _answer(task: bytes) -> bytes:
    """Run a task; return (True, result) or (False, traceback), pickled. Restore the environment."""
    environment = dict(os.environ)
    torch.manual_seed(0)
    try:
        sys.path[:], fn, args, kwargs = _unpack(task)
        result = tree_map_only(torch.Tensor, _plain, fn(*args, **kwargs))
        return _pack((True, result))
    except BaseException:
        return _pack((False, traceback.format_exc()))
    finally:
        os.environ.clear()
        os.environ.update(environment)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "device_mesh"):
        raise TypeError(
            f"a rank returned a DTensor {tuple(tensor.shape)}; return its to_local() or "
            "full_tensor()"
        )
    return tensor.detach().cpu()
