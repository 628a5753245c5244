"""scripts.train.train with one fault, for scripts.train.fault_test: what fails, where, when.

The environment variable `FAULT` holds a `Fault` as JSON. The fault happens once: a file, named by
`FAULT_RECORD`, says that it did, and a restarted run goes on without it.
"""

import dataclasses
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.train import checkpoints, train

# What the names of collectives have in them, by the point at which a fault happens.
POINTS = {
    "gather": ("all_gather", "allgather"),
    "backward": ("reduce_scatter",),
    "precompute": ("all_reduce", "allreduce"),
    "write": (),
}
SMALL_DISK = 100_000  # bytes of a file; less than a rank's shards


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault of one rank.

    Attributes:
        signal: what the rank sends to itself: "SIGKILL", "SIGTERM", "SIGSTOP"; "" for none.
        point: of `POINTS`.
        rank: which rank.
        step: from which step on.
        nth: how many times the point is passed before.
        late_s: how long the rank waits before it starts.
        full_disk: files can't grow beyond `SMALL_DISK` while the checkpoint of `step` is written.
    """

    signal: str = ""
    point: str = "gather"
    rank: int = 0
    step: int = 0
    nth: int = 0
    late_s: float = 0.0
    full_disk: bool = False


class Trigger:
    """Counts how often a fault's point is passed, and lets it happen; writes the step to a file."""

    def __init__(self, fault: Fault, record: Path) -> None:
        self.fault = fault
        self.record = record
        self.step = 0
        self.passed = 0

    def happened(self) -> None:
        """Leave a note for the runs that follow."""
        with self.record.open("w") as stream:
            stream.write(str(self.step))
            stream.flush()

    def pass_point(self) -> None:
        """The rank is at the point."""
        if not self.fault.signal or self.step < self.fault.step or self.record.exists():
            return
        if self.passed == self.fault.nth:
            self.happened()
            os.kill(os.getpid(), signal.Signals[self.fault.signal])
        self.passed += 1


class BeforeCollectives(TorchDispatchMode):
    """Passes the point before every collective whose name has one of some words in it."""

    def __init__(self, trigger: Trigger, words: tuple[str, ...]) -> None:
        super().__init__()
        self.trigger = trigger
        self.words = words

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(word in str(func) for word in self.words):
            self.trigger.pass_point()
        return func(*args, **(kwargs or {}))


@contextmanager
def small_disk() -> Iterator[None]:
    """Files of this process can't grow beyond `SMALL_DISK`, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_DISK, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def install(fault: Fault, record: Path) -> None:
    """Replace what the training script calls, on the rank of the fault."""
    trigger = Trigger(fault, record)
    words = POINTS[fault.point]
    in_update = fault.point == "precompute"

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with BeforeCollectives(trigger, words):
                return call(*args)

        return run

    step, start = train.Trainer.step, train.Trainer.__init__

    def counted_step(self: train.Trainer, number: int) -> Any:
        trigger.step = number
        near = fault.step <= number and words and not in_update
        return watched(step)(self, number) if near else step(self, number)

    def watched_start(self: train.Trainer, *args: Any) -> None:
        start(self, *args)
        if in_update:
            self.after_step = watched(self.after_step)

    train.Trainer.step = counted_step
    train.Trainer.__init__ = watched_start
    if fault.point == "write":
        sync = os.fsync

        def watched_sync(descriptor: Any) -> None:
            trigger.pass_point()
            sync(descriptor)

        os.fsync = watched_sync
    if fault.full_disk:
        checkpoints.FileSystemWriter = lambda path, **options: OnSmallDisk(trigger, path, **options)


class OnSmallDisk(FileSystemWriter):
    """Writes files while there is a small disk, from the step of the fault on, once."""

    def __init__(self, trigger: Trigger, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self.trigger = trigger

    def write_data(self, *args: Any) -> Any:
        """See FileSystemWriter."""
        if self.trigger.step < self.trigger.fault.step or self.trigger.record.exists():
            return super().write_data(*args)
        self.trigger.happened()
        with small_disk():
            return super().write_data(*args)


def run_rank(options: list[str] | None, fault: Fault, record: Path) -> int:
    """Trains on this rank, with the fault if it is this rank's; a bad end ends the process."""
    if int(os.environ["RANK"]) == fault.rank and not record.exists():
        if fault.late_s:
            Trigger(fault, record).happened()
            time.sleep(fault.late_s)
        install(fault, record)
    status = train.main(options)
    if status:
        sys.stdout.flush()
        os._exit(status)
    return status


def main() -> int:
    """Entry point; returns the exit status of the training script."""
    fault = Fault(**json.loads(os.environ["FAULT"]))
    return run_rank(None, fault, Path(os.environ["FAULT_RECORD"]))


if __name__ == "__main__":
    sys.exit(main())
