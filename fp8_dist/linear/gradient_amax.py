"""Global amaxes of output gradients, reduced before the GEMMs ask for them, and several at once.

``wq``, ``wk`` and ``wv`` of an attention, ``w1`` and ``w3`` of a feed-forward take one input that
was cast before: they are *siblings*. Autograd would run the backward of each as soon as its
gradient is there, with an all-reduce of its own. Here the GEMMs of siblings run after the gradients
of all of them are there, and one all-reduce serves them.

The backward of a call of a layer is in two functions (:mod:`fp8_dist.linear.autograd`). The first
takes the local amax (:meth:`GradientAmax.find`); the last sibling to do so starts the all-reduce.
The second one waits for it (:meth:`GradientAmax.take`). If a sibling takes no part in a backward
pass, the first GEMM that needs an amax starts the all-reduce of those that were found.

All ranks run the same functions in the same order, so they reduce the same amaxes at once.
"""

import threading
from typing import Any
from weakref import ReferenceType, ref

import torch

from fp8_dist.cast import amax_groups, local_amax
from fp8_dist.granularity import TENSOR
from fp8_dist.mesh import AmaxReduction, GroupNames, Placements, local_tensor
from fp8_dist.torch_internals import sequence_number, set_sequence_number

# So many siblings keep their order.
_PLACES = 16


class Siblings:
    """The calls of layers that take one input."""

    def __init__(self) -> None:
        self._calls = 0
        self._first = self._places = 0  # numbers of nodes
        self._waiting: dict[GradientAmax, tuple[torch.Tensor, GroupNames]] = {}

    def add(self, gemms: Any) -> None:
        """Add a call: the autograd node of its GEMMs, which is to run after those of amaxes."""
        # Of the nodes that are ready, autograd runs the one that was made last. So the GEMMs' nodes
        # are numbered as if they were made, in their order, before all else that uses the input.
        if not self._calls:
            number = sequence_number(gemms)
            self._places = min(number, _PLACES)
            self._first = number - self._places
        set_sequence_number(gemms, self._first + max(0, min(self._calls, self._places - 1)))
        self._calls += 1

    def found(self, call: "GradientAmax", amax: torch.Tensor, groups: GroupNames) -> None:
        """Note a local amax; if it is the last one, start to reduce all of them."""
        self._waiting[call] = amax, groups
        if len(self._waiting) >= self._calls:
            self.reduce()

    def waits(self, call: "GradientAmax") -> bool:
        """Whether the amax of a call was found, and its reduction did not start."""
        return call in self._waiting

    def reduce(self) -> None:
        """Start to reduce the amaxes that were found: an all-reduce for each set of groups."""
        waiting, self._waiting = self._waiting, {}
        for groups in dict.fromkeys(groups for _, groups in waiting.values()):
            chosen = {call: amax for call, (amax, over) in waiting.items() if over == groups}
            joint = _JointReduction(list(chosen.values()), groups)
            for i, call in enumerate(chosen):
                call.reduction = joint, i


class GradientAmax:
    """The amax of the output gradient of one call of a layer, over the mesh.

    Attributes:
        placements: where the GEMMs need the gradient; known after the forward.
        axes: mesh axes over which it may be reduced; ``None``: all.
        reduction: where to find the amax, and at which place, once its reduction has started.
    """

    def __init__(self, siblings: Siblings) -> None:
        self.siblings = siblings
        self.placements: Placements | None = None
        self.reduction: tuple[_JointReduction, int] | None = None

    def find(self, grad: torch.Tensor, axes: tuple[int, ...] | None) -> None:
        """Take the local amax of a gradient (a DTensor), if it is to be reduced over ``axes``."""
        self.reduction = None
        if groups := amax_groups(grad, TENSOR, axes):
            self.siblings.found(self, local_amax(local_tensor(grad), TENSOR), groups)

    def take(self) -> torch.Tensor | None:
        """The amax over the mesh, fp32, 0-dim; ``None`` if none was found since the last time."""
        if self.siblings.waits(self):
            self.siblings.reduce()
        reduction, self.reduction = self.reduction, None
        if reduction is None:
            return None
        joint, i = reduction
        return joint.values()[i]


class _JointReduction:
    """One all-reduce of several amaxes, fp32, 0-dim."""

    def __init__(self, amaxes: list[torch.Tensor], groups: GroupNames) -> None:
        vector = amaxes[0] if len(amaxes) == 1 else torch.stack(amaxes)
        self._reduction = AmaxReduction(vector, groups)
        self._values: list[torch.Tensor] | None = None

    def values(self) -> list[torch.Tensor]:
        """The maxima over the mesh; waits for them."""
        if self._values is None:
            found = self._reduction.wait()
            self._values = [found] if found.ndim == 0 else list(found.unbind())
        return self._values


class _Last(threading.local):
    """The input that was seen last, and the calls that take it.

    Each thread has its own: where threads are ranks, they must agree on what is reduced at once.
    """

    seen: tuple[ReferenceType[torch.Tensor], Siblings] | None = None


_last = _Last()


def siblings_of(input: torch.Tensor) -> Siblings:
    """The calls of layers that take an input (the same object), as long as no other was seen."""
    if _last.seen is None or _last.seen[0]() is not input:
        _last.seen = ref(input), Siblings()
    return _last.seen[1]
