"""Progress of planned steps, with an estimate of the time that they still take."""

from collections.abc import Sequence
from time import monotonic

from torch import nn

from fp8_dist.text import progress

# The time from the beginning of a phase to the end of the step, relative to that of the forward:
# measured with the reference Llama.
LEFT = {"backward": 1.5, "optimizer": 0.4}
PAUSE = 10.0  # seconds between two lines of a forward


class Pace:
    """Prints what a step does and, from the second block of its forward on, the time that is left.

    Blocks are counted as they return. The first one fills caches, so its time is left out.

    Args:
        name: of the step.
        blocks: the blocks of its model.
    """

    def __init__(self, name: str, blocks: Sequence[nn.Module]) -> None:
        self.name, self.count, self.done = name, len(blocks), 0
        self.begin = self.printed = monotonic()
        self.forward = 0.0  # seconds, by the blocks so far
        for block in blocks:
            block.register_forward_hook(self.returned)

    def phase(self, name: str) -> None:
        """Say that a phase begins."""
        progress(f"{self.name}: {name}{about(self.forward * LEFT.get(name, 0.0))}")

    def returned(self, *_: object) -> None:
        """Count a block, and say how long the step takes from here."""
        now, self.done = monotonic(), self.done + 1
        if self.done == 1:
            self.begin = now
            return
        per_block = (now - self.begin) / (self.done - 1)
        self.forward = per_block * self.count
        if self.done == 2 or now - self.printed > PAUSE:
            self.printed = now
            left = per_block * (self.count - self.done) + self.forward * LEFT["backward"]
            progress(f"{self.name}: block {self.done} of {self.count}{about(left)}")


def about(seconds: float) -> str:
    """The end of a line of progress."""
    return f", about {seconds:.0f} s left" if seconds >= 1 else ""
