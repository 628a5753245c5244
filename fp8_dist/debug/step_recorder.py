"""What recorders of casts have in common: blocks that are steps, and inputs that layers share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Generic, Self, TypeVar

import torch

from fp8_dist.config import Gemm, Operand
from fp8_dist.linear.observing import Owner, observed_by
from fp8_dist.tensor import Quantized

# What a recorder keeps of a prepared input until layers take it.
Kept = TypeVar("Kept")


class StepRecorder(ABC, Generic[Kept]):
    """A context manager that is shown the casts of each step whose block is entered.

    It is a :class:`~fp8_dist.linear.observing.CastObserver`.

    Attributes:
        step: the number of the last step that was entered.
    """

    def __init__(self, name: str) -> None:
        self.step = -1
        self._name = name  # for messages
        self._stack: ExitStack | None = None
        self._prepared: dict[int, Kept] = {}  # by the number of the cast

    def at(self, step: int) -> Self:
        """This object, to be entered for the step of this number."""
        self.step = step - 1
        return self

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise RuntimeError(f"this {self._name} is already recording; leave its block first")
        self.step += 1
        self._stack = ExitStack()
        # On all ranks, so that compiled code has the same operators on all of them.
        if self._is_recorded(self.step):
            self._begin(self._stack)
            self._stack.enter_context(observed_by(self))
        return self

    def __exit__(self, error: Any, *others: Any) -> None:
        stack, self._stack = self._stack, None
        assert stack is not None
        stack.close()
        self._prepared.clear()
        self._end(failed=error is not None)

    @abstractmethod
    def _is_recorded(self, step: int) -> bool:
        """Whether casts of this step are to be shown."""

    def _begin(self, stack: ExitStack) -> None:
        """A step that is recorded begins; ``stack`` is closed when it ends."""

    @abstractmethod
    def _end(self, failed: bool) -> None:
        """A block has ended, perhaps by an error."""

    @abstractmethod
    def on_casts(
        self,
        owner: Owner,
        operand: Operand,
        high: torch.Tensor,
        lows: Mapping[tuple[Gemm, ...], Quantized],
    ) -> None:
        """A layer has cast an operand: see :class:`~fp8_dist.linear.observing.CastObserver`."""

    def on_prepared_cast(
        self, owner: Owner, number: int, high: torch.Tensor, low: Quantized
    ) -> None:
        """An input was cast for several layers."""
        if (kept := self._keep(owner, high, low)) is not None:
            self._prepared[number] = kept

    def on_prepared_use(self, owner: Owner, number: int) -> None:
        """A layer takes the input that was cast under this number."""
        self._take(owner, self._prepared.get(number))

    @abstractmethod
    def _keep(self, owner: Owner, high: torch.Tensor, low: Quantized) -> Kept | None:
        """What to keep of a prepared input, cast in the way of the layer ``owner``."""

    @abstractmethod
    def _take(self, owner: Owner, kept: Kept | None) -> None:
        """A layer takes a prepared input, of which this was kept."""
