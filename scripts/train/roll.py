"""Roll call: the ranks of a run sign a roll in the store through which they found each other.

When a rank dies or hangs, the others learn that a connection is closed, or that a collective took
too long, and each prints a traceback that does not say which rank it was. The roll does.
"""

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

# How long ranks that lost a connection wait for the others to say the same.
GRACE_S = 3.0
_LOST = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "broken pipe")


class MissingRank(RuntimeError):
    """Ranks did not start in time; the text names them. It is empty where another rank says it."""


class Roll:
    """The ranks of one attempt of a run.

    Args:
        store: of the rendezvous; all ranks reach it.
        rank, world_size: of this process.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = dist.PrefixStore("roll", store)
        self.rank = rank
        self.world_size = world_size

    def call(self, timeout_s: float) -> None:
        """Wait until all ranks have started.

        Raises:
            MissingRank: some have not, after `timeout_s`.
        """
        self._store.set(f"here/{self.rank}", f"{os.getpid()} {socket.gethostname()}")
        missing = self._missing("here", timeout_s)
        if missing:
            says_it = all(rank in missing for rank in range(self.rank))
            names = _names(missing)
            text = (
                f"{names} of {self.world_size} did not start within {timeout_s:g} s: look at the "
                f"log of {names}, or give a longer --timeout"
            )
            raise MissingRank(text if says_it else "")

    def at_step(self, step: int) -> None:
        """This rank begins a step."""
        self._store.set(f"step/{self.rank}", str(step))

    def explain(self, error: BaseException) -> str | None:
        """One line that names the rank at fault, on one of the others; None on the rank itself.

        All ranks that fail call it, and end afterwards. An empty line: another rank says it. A rank
        that is silent because it waits for one of those that call this is not at fault: where
        processes of this host are gone, these alone are named.
        """
        text = f"{type(error).__name__}: {(str(error).strip() or 'no text').splitlines()[0]}"
        try:
            if not is_lost_connection(error):
                self._store.set(f"failed/{self.rank}", text)
                return None
            self._store.set(f"lost/{self.rank}", "")
            silent = self._missing("lost", GRACE_S)
            here = [rank for rank in range(self.world_size) if rank not in silent]
            # (A rank that waited for others loses its connection when these have said it.)
            if self.rank != here[0] or self._store.add("said", 1) > 1:
                return ""
            failed = [rank for rank in silent if self._store.check([f"failed/{rank}"])]
            if failed:
                said = self._store.get(f"failed/{failed[0]}").decode()
                return f"{_names(failed[:1])} of {self.world_size} failed: {said}"
            if silent:
                silent = [rank for rank in silent if self._is_gone(rank)] or silent
                return (
                    f"{_names(silent)} of {self.world_size} died or hangs: no answer since "
                    f"{self._last_step(silent[0])}"
                )
            return f"all {self.world_size} ranks are there, and lost a connection: {text}"
        except (RuntimeError, OSError):  # torch's errors of stores are RuntimeErrors
            return f"rank {self.rank} of {self.world_size} lost the store of the run, after: {text}"

    def _last_step(self, rank: int) -> str:
        key = f"step/{rank}"
        return f"step {self._store.get(key).decode()}" if self._store.check([key]) else "its start"

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank's process was on this host and has ended."""
        key = f"here/{rank}"
        if not self._store.check([key]):
            return False
        pid, host = self._store.get(key).decode().split(" ", 1)
        if host != socket.gethostname():
            return False
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        return False

    def _missing(self, what: str, timeout_s: float) -> list[int]:
        """The ranks that have not signed, once all have or the time is over."""
        deadline = time.monotonic() + timeout_s
        missing = list(range(self.world_size))
        while missing := [rank for rank in missing if not self._store.check([f"{what}/{rank}"])]:
            if time.monotonic() > deadline:
                break
            if what == "lost" and any(self._store.check([f"failed/{rank}"]) for rank in missing):
                break
            time.sleep(0.05)
        return missing


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error is that of a collective whose other ranks did not come."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _LOST)


def rendezvous(timeout_s: float) -> tuple[dist.Store, int, int]:
    """The store, this rank and the number of ranks, as torchrun's environment says.

    torchrun keeps one store for all its restarts. Each attempt has a prefix of its own, or gloo
    would connect to the addresses of ranks that are gone.
    """
    store, rank, ranks = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt/{attempt}", store), rank, ranks


def _names(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
