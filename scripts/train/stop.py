"""Ending a run early: SIGTERM and SIGUSR1 ask for a checkpoint after the step that is under way."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this rank was asked to stop, and whether any rank was."""

    def __init__(self) -> None:
        self.signal = 0  # its number

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.signal = number

    def agreed(self, group: dist.ProcessGroup) -> str:
        """The name of the signal that any rank has got, on all ranks alike; "" without one.

        Collectives: an all-reduce of 8 bytes on the CPU.
        """
        number = torch.tensor(self.signal, device="cpu")
        dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
        return signal.Signals(int(number)).name if number else ""


def stop_on_signals() -> StopRequest:
    """From now on this process takes note of `SIGNALS` instead of ending.

    To its end: torchrun sends SIGTERM to all ranks when one has died, and they say why they fail.
    """
    request = StopRequest()
    for number in SIGNALS:
        signal.signal(number, request.handle)
    return request
