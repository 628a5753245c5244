"""scripts.train.train with one fault, for scripts.train.fault_test: what fails, where, when.

The fault happens once: a file says that it did, and a restarted run goes on without it.
"""

import dataclasses
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.common.gloo import leave
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


class BeforeCollectives(TorchDispatchMode):
    """Passes the point before every collective whose name has one of some words in it.

    Args:
        fault: what happens when the point was passed often enough.
        record: the file that says in which step it happened.
    """

    def __init__(self, fault: Fault, record: Path) -> None:
        super().__init__()
        self.fault = fault
        self.record = record
        self.step = self.passed = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(word in str(func) for word in POINTS[self.fault.point]):
            self.pass_point()
        return func(*args, **(kwargs or {}))

    def happened(self) -> None:
        """Leave a note for the runs that follow."""
        self.record.write_text(str(self.step))

    def pass_point(self) -> None:
        """The rank is at the point."""
        if not self.fault.signal or self.step < self.fault.step or self.record.exists():
            return
        if self.passed == self.fault.nth:
            self.happened()
            os.kill(os.getpid(), signal.Signals[self.fault.signal])
        self.passed += 1

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call under this mode."""

        def run(*args: Any) -> Any:
            with self:
                return call(*args)

        return run


def install(fault: Fault, record: Path) -> None:
    """Replace what the training script calls, on the rank of the fault."""
    trigger = BeforeCollectives(fault, record)
    step, start, sync = train.Trainer.step, train.Trainer.__init__, os.fsync

    def counted_step(self: train.Trainer, number: int) -> Any:
        trigger.step = number
        near = fault.step <= number and fault.point in ("gather", "backward")
        return (trigger.watched(step) if near else step)(self, number)

    def watched_start(self: train.Trainer, *args: Any) -> None:
        start(self, *args)
        if fault.point == "precompute":
            self.after_step = trigger.watched(self.after_step)

    def watched_sync(descriptor: Any) -> None:
        trigger.pass_point()
        sync(descriptor)

    class OnSmallDisk(FileSystemWriter):
        """Files can't grow beyond `SMALL_DISK` from the step of the fault on, once."""

        def write_data(self, *args: Any) -> Any:
            if trigger.step < fault.step or record.exists():
                return super().write_data(*args)
            trigger.happened()
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_DISK, limits[1]))
            try:
                return super().write_data(*args)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    train.Trainer.step = counted_step
    train.Trainer.__init__ = watched_start
    if fault.point == "write":
        os.fsync = watched_sync
    if fault.full_disk:
        checkpoints.FileSystemWriter = OnSmallDisk


def run_rank(options: list[str], fault: Fault, record: Path) -> int:
    """Trains on this rank, with the fault if it is this rank's; a bad end ends the process."""
    if int(os.environ["RANK"]) == fault.rank and not record.exists():
        if fault.late_s:
            record.write_text("0")
            time.sleep(fault.late_s)
        install(fault, record)
    status = train.main(options)
    if status:
        leave(status)
    return status
