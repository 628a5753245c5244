"""The runner of `scripts.prove`: it runs stages in processes of their own, on all ranks alike.

Each rank of the launcher runs a :class:`Runner`, which does not use the device. For each stage it
forks a process that runs the cases. A case that raises, crashes, or waits too long ends the
process of its stage on all ranks. New processes then continue at the next case. So a case costs no
other case its result, and a stage no other stage.
"""

import json
import os
import signal
import time
import traceback
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from tqdm import tqdm

from scripts.common.gloo import leave
from scripts.prove.results import START, Result, Worker, append, commit, read, shown
from scripts.prove.stages import Stage
from scripts.train.train_run import choose_device, process_group

POLL = 0.05  # seconds between two looks at a process
NEWER = ". Install a newer driver, or a build of torch for this one"
FORK = get_context("fork")  # torch is imported once per rank


class Place(NamedTuple):
    """Where a process of a stage runs.

    Attributes:
        device: the device of this rank.
        ranks: the number of ranks of the stage.
        per_node: the number of ranks of the launcher on this node.
        seconds: the time that the stage has left.
    """

    device: torch.device
    ranks: int
    per_node: int
    seconds: float


class Runner:
    """A rank that runs stages.

    Attributes:
        rank, ranks: this rank, and their number.
        results: the file of results; rank 0's has those of all ranks.

    Args:
        folder: the folder of results, and of a log of each stage.
    """

    def __init__(self, folder: Path) -> None:
        own = os.environ.get
        self.rank, self.ranks = int(own("RANK", "0")), int(own("WORLD_SIZE", "1"))
        self._local = int(own("LOCAL_RANK", "0")), int(own("LOCAL_WORLD_SIZE", "1"))
        self._folder, self._begin = folder, time.monotonic()
        name = "results" if self.rank == 0 else f"results.{self.rank}"
        self.results = folder / f"{name}.jsonl"
        for path in (self.results, *folder.glob(f"*.{self.rank}.log")):
            path.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._attempts = own("TORCHELASTIC_RESTART_COUNT", "0")
        store: dist.Store = dist.HashStore()
        if self.ranks > 1:
            store = next(dist.rendezvous("env://", timeout=timedelta(seconds=600)))[0]
        self._store = dist.PrefixStore(self._attempts, store)
        self._stopped = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)

    def _stop(self, *_: Any) -> None:
        self._stopped = True

    def has_gpu(self) -> bool:
        """Whether each rank has a GPU. (A process that looks for one can't fork others.)

        Raises:
            RuntimeError: a rank has a GPU that does not work. All ranks raise it.
        """
        answer = FORK.SimpleQueue()
        process = FORK.Process(target=self._try_gpu, args=(answer,))
        process.start()
        process.join(60)  # a driver may hang
        process.kill()
        mine = f"no answer, exit status {process.exitcode}" if answer.empty() else answer.get()
        found = [said["gpu"] for said in self._hear("gpu", {"gpu": mine})]
        for rank, error in enumerate(found):
            if error not in ("cuda", "cpu"):
                raise RuntimeError(f"no rank can start: the GPU of rank {rank}: {error}")
        return {*found} == {"cuda"}

    def _try_gpu(self, answer: Any) -> None:
        """Say the type of this rank's device, or why it can't be used."""
        try:
            device = self._device()
            torch.ones(1, device=device)
            answer.put(device.type)
        except BaseException as error:  # drivers, CUDA and torch raise many types
            answer.put(shown(error) + NEWER * ("driver" in str(error)))
        os._exit(0)

    def _device(self) -> torch.device:
        return choose_device(*self._local)[0]

    def wait_for_others(self, seconds: float) -> None:
        """Set the time after which ranks that have not spoken are no longer waited for."""
        self._store.set_timeout(timedelta(seconds=seconds))

    def place(self, device: str) -> Place:
        return Place(torch.device(device), self.ranks, self._local[1], 0.0)

    def agree(self, status: int) -> int:
        """Return rank 0's status on the first rank of each node, and 0 on others."""
        status = self._hear("status", {"status": status})[0]["status"]
        self._hear("end", {})  # the launcher's store may end with rank 0
        # A launcher also reports ranks that it stops because another one has failed.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return status if self._local[0] == 0 else 0

    def seconds(self) -> float:
        """The seconds since this began."""
        return time.monotonic() - self._begin

    def run(self, stage: Stage, end: float) -> str:
        """Run a stage on all ranks; return how it ended, the same text on all ranks.

        end: the latest end, in seconds since this began.
        """
        number, skipped, outcome = 0, frozenset[str](), ""
        while not self._stopped:
            key = f"{stage.name}/{number}"
            heard = self._hear(key, self._attempt(stage, key, skipped, end))
            outcome = next((said["outcome"] for said in heard if said["outcome"]), "")
            begun = {name for said in heard for name in said["begun"]}
            if self.rank == 0:
                self._keep(stage, heard)
            if not outcome or not begun or any(said["over"] for said in heard):
                break
            skipped, number = skipped | begun, number + 1
        return outcome or ("stopped by a signal" if self._stopped else "ended")

    def _attempt(
        self, stage: Stage, key: str, skipped: frozenset[str], end: float
    ) -> dict[str, Any]:
        """Run this rank's process; return what the other ranks must know."""
        begun = self._folder / f"{stage.name}.{self.rank}.begun"
        begun.write_text("")
        known, outcome, over = len(read(self.results)), "", False
        if not stage.alone or self.rank == 0:
            task = (stage, key, skipped, begun, end - self.seconds())
            process = FORK.Process(target=self._work, args=task)
            process.start()
            outcome, over = self._watch(process, stage, key, begun, end)
        results = read(self.results)[known:]
        names = begun.read_text().splitlines()
        begun.unlink()
        mine = [r.__dict__ for r in results] if self.rank else []
        unfinished = [name for name in names if name not in {r.name for r in results}]
        if outcome and not (names or results):
            unfinished = [START]
        said = {"begun": names, "results": mine, "unfinished": unfinished}
        return said | {"outcome": outcome, "over": over, "rank": self.rank}

    def _watch(
        self, process: Any, stage: Stage, key: str, begun: Path, end: float
    ) -> tuple[str, bool]:
        """Wait for a process; return why it ended early ("" if not), and if its time is over."""
        reason, over = "", False
        silent = True if self.rank else None
        bar = tqdm(desc=stage.name, unit="case", leave=False, disable=silent)
        size, changed = 0, self.seconds()
        while process.is_alive() and not reason:
            process.join(POLL)
            now = self.seconds()
            if begun.stat().st_size != size:
                size, changed = begun.stat().st_size, now
                bar.update(len(begun.read_text().splitlines()) - bar.n)
            bar.set_postfix_str(f"{end - now:.0f} s left", refresh=False)
            if self._stopped or now >= end:
                reason, over = "stopped at the end of its time", True
                reason = "stopped by a signal" if self._stopped else reason
            elif now - changed > stage.patience:
                reason = f"stopped after {now - changed:.0f} s without a result"
            elif self._store.check([f"{key}/stop"]):
                reason = self._store.get(f"{key}/stop").decode()
        bar.close()
        status = process.exitcode or 0
        if status < 0:  # also where another rank has noticed it
            reason = f"ended with {signal.Signals(-status).name}"
        elif status:
            reason = reason or f"ended with status {status}"
        if reason and not self._store.check([f"{key}/stop"]):
            self._store.set(f"{key}/stop", f"rank {self.rank} {reason}")
        process.kill()
        with suppress(ProcessLookupError):  # also its ranks and compilers
            os.killpg(process.pid, signal.SIGKILL)
        process.join(5)  # a driver may hold a process for ever
        return reason, over

    def _hear(self, key: str, said: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchange what the ranks say of an attempt."""
        if self.ranks == 1 or self._stopped:
            return [said]
        self._store.set(f"{key}/said/{self.rank}", json.dumps(said))
        return [json.loads(self._store.get(f"{key}/said/{r}")) for r in range(self.ranks)]

    def _keep(self, stage: Stage, heard: list[dict[str, Any]]) -> None:
        """Append the results of other ranks, and an error for each case without a result."""
        for said in heard:
            results = [Result(**fields) for fields in said["results"]]
            identity = {"commit": commit(), "rank": said["rank"], "at": time.time()}
            results += [
                Result(stage.name, name, error=said["outcome"], **identity)
                for name in said["unfinished"]
            ]
            if results:
                append(self.results, *results)

    def _work(
        self, stage: Stage, key: str, skipped: frozenset[str], begun: Path, seconds: float
    ) -> NoReturn:
        """The process of a stage on this rank."""
        os.environ |= stage.environment
        os.setsid()  # so that a signal reaches the processes that it starts
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        log = os.open(
            self._folder / f"{stage.name}.{self.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        for stream in (1, 2):
            os.dup2(log, stream)
        status = 1
        try:
            ranks = 1 if stage.alone else self.ranks
            store = self._client() if ranks > 1 else dist.HashStore()
            meet = partial(_meet, store, key, ranks)
            worker = Worker(stage.name, self.rank, self.results, begun, skipped, meet)
            group = (
                nullcontext((self._device(), ""))
                if stage.alone
                else process_group(dist.PrefixStore(f"{key}/group", store))
            )
            module, _, function = stage.run.partition(":")
            with group as (device, _):
                place = Place(device, ranks, self._local[1], seconds)
                getattr(import_module(f"scripts.prove.{module}"), function)(worker, place)
            status = 0
        except BaseException as error:
            traceback.print_exc()
            if not begun.read_text():
                append(self.results, Result(stage.name, START, rank=self.rank, error=shown(error)))
        leave(status)

    def _client(self) -> dist.Store:
        """A connection of this process to the store of the ranks."""
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.PrefixStore(self._attempts, dist.TCPStore(*address, is_master=False))


def _meet(store: dist.Store, key: str, ranks: int, text: str) -> None:
    """Wait until all ranks have come to the same text."""
    if store.add(f"{key}/met/{text}", 1) == ranks:
        store.set(f"{key}/all/{text}", "")
    store.wait([f"{key}/all/{text}"], timedelta(hours=24))
