"""Base class for recorders of casts: blocks that are steps, and inputs that layers share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Generic, Self, TypeVar

import torch

from fp8_dist.config import Gemm, Operand
from fp8_dist.linear.observing import Owner, observed_by
from fp8_dist.scaling import Quantized

# The data that a recorder keeps of a prepared input until layers take it.
Kept = TypeVar("Kept")


class StepRecorder(ABC, Generic[Kept]):
    """Context manager that observes the casts of each step whose block is entered.

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
        """Return this object, to be entered for the step with this number."""
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
        """Whether the casts of this step are recorded."""

    def _begin(self, stack: ExitStack) -> None:
        """Begin a recorded step; ``stack`` is closed when it ends."""

    @abstractmethod
    def _end(self, failed: bool) -> None:
        """End a block, which may have ``failed`` with an error."""

    @abstractmethod
    def on_casts(
        self,
        owner: Owner,
        operand: Operand,
        high: torch.Tensor,
        lows: Mapping[tuple[Gemm, ...], Quantized],
    ) -> None:
        """Record casts of an operand. See :class:`~fp8_dist.linear.observing.CastObserver`."""

    def on_prepared_cast(
        self, owner: Owner, number: int, high: torch.Tensor, low: Quantized
    ) -> None:
        """Record the cast of an input for several layers."""
        if (kept := self._keep(owner, high, low)) is not None:
            self._prepared[number] = kept

    def on_prepared_use(self, owner: Owner, number: int) -> None:
        """Record that a layer takes the input that was cast under this number."""
        self._take(owner, self._prepared.get(number))

    @abstractmethod
    def _keep(self, owner: Owner, high: torch.Tensor, low: Quantized) -> Kept | None:
        """Return the data to keep of a prepared input, which was cast as the layer ``owner``'s."""

    @abstractmethod
    def _take(self, owner: Owner, kept: Kept | None) -> None:
        """Record that a layer takes a prepared input; ``kept`` is what :meth:`_keep` returned."""
