"""Global amaxes of output gradients, reduced ahead of the GEMMs, and several at once.

``wq``, ``wk`` and ``wv`` of an attention, or ``w1`` and ``w3`` of a feed-forward, take one input
that was cast before: they are *siblings*. By default autograd runs the backward of each as soon as
its gradient is ready, with an all-reduce of its own. Here the GEMMs of siblings run after the
gradients of all of them are ready, and one all-reduce serves them.

The backward of a layer's call consists of two functions (:mod:`fp8_dist.linear.autograd`). The
first computes the local amax (:meth:`GradientAmax.find`), and the last sibling to do so starts the
all-reduce. The second waits for it (:meth:`GradientAmax.take`). If a sibling takes no part in a
backward pass, the first GEMM that needs an amax starts the all-reduce of those that were computed.

Of the nodes that are ready, autograd runs the one with the largest sequence number, which was made
last. The GEMM nodes of siblings get numbers that were reserved before the forward of the module
around them (:func:`fp8_dist.tensor_parallel.PrepareFloat8ModuleInput` makes the :class:`Siblings`):

- All nodes that lead to an output gradient of a sibling were made later, so they run earlier. This
  holds for any graph, also if other ranks have additional nodes.
- Nodes made before the module run after the GEMMs, as they do if the GEMM nodes are not moved:
  FSDP2's post-backward of the module, and of modules around it. FSDP2's nodes of modules inside it
  were made later, so a layer there is not a sibling.
- Siblings keep autograd's order: the one that was called last runs first. A layer that takes the
  same input and is not a sibling runs before all of them. The gradient of the input is summed in
  this order.

Numbers are reserved for one call of each layer. If a layer is called again, the last calls share a
number, and their order is undefined. So only layers whose backward GEMMs issue no collective are
siblings: their input and output gradient need no redistribution.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from fp8_dist.cast import amax_groups, local_amax
from fp8_dist.device import current_stream
from fp8_dist.granularity import TENSOR
from fp8_dist.mesh import AmaxReduction, GroupNames, Placements, local_tensor, ranks_of
from fp8_dist.torch_internals import (
    backward_id,
    reserve_sequence_numbers,
    set_sequence_number,
)


class Siblings:
    """The calls of sibling layers within one call of the module around them.

    Args:
        places: the number of calls that keep their order; 0 for a call without siblings, which is
            not moved.
    """

    def __init__(self, places: int = 0) -> None:
        self._places, self._calls = places, 0
        self._numbers = reserve_sequence_numbers(places)
        self._backward = -1  # the backward pass that the amaxes in _found belong to
        self._found: dict[GradientAmax, _Found] = {}

    def add(self, gemms: Any) -> int:
        """Add a call, move ``gemms``, the node of its GEMMs, and return the call's place."""
        self._calls += 1
        if self._numbers:
            set_sequence_number(gemms, self._numbers[min(self._calls, self._places) - 1])
        return self._calls

    def found(self, call: "GradientAmax", amax: torch.Tensor, groups: GroupNames) -> None:
        """Add a local amax; if it is the last one, start to reduce all of them."""
        if self._backward != backward_id():
            self._backward = backward_id()
            self._found.clear()  # a backward pass may end before it reaches the GEMMs
        self._found[call] = _Found(amax, groups, current_stream(amax.device))
        if len(self._found) == self._calls:
            self.reduce()

    def awaits(self, call: "GradientAmax") -> bool:
        """Whether a call's amax was found in this backward pass and is not being reduced yet."""
        return call in self._found and self._backward == backward_id()

    def reduce(self) -> None:
        """Start to reduce the amaxes that were found, with one all-reduce per set of ranks."""
        found, self._found = self._found, {}
        together: dict[Hashable, list[GradientAmax]] = {}
        # In the order of the forward, which all ranks share.
        for call in sorted(found, key=lambda call: call.place):
            # Streams are not synchronized: an amax is used on the stream that it was found on.
            key = ranks_of(found[call].groups), found[call].stream
            together.setdefault(key, []).append(call)
        for calls in together.values():
            joint = _JointReduction([found[call].amax for call in calls], found[calls[0]].groups)
            for i, call in enumerate(calls):
                call.started(joint, i)


class _Found(NamedTuple):
    amax: torch.Tensor
    groups: GroupNames
    stream: torch.Stream | None


class GradientAmax:
    """The global amax of the output gradient of one call of a layer.

    Attributes:
        placements: the placements of the gradient that the GEMMs need.
        place: the place of the call among the siblings.
    """

    def __init__(self, siblings: Siblings, placements: Placements, gemms: Any) -> None:
        self.placements, self.place = placements, siblings.add(gemms)
        self._siblings = siblings
        self._started: tuple[_JointReduction, int, int] | None = None

    def find(self, grad: torch.Tensor, axes: tuple[int, ...] | None) -> None:
        """Compute the local amax of a gradient (a DTensor), if it must be reduced over ``axes``."""
        if groups := amax_groups(grad, TENSOR, axes):
            self._siblings.found(self, local_amax(local_tensor(grad), TENSOR), groups)

    def started(self, reduction: "_JointReduction", i: int) -> None:
        """Note the started reduction, in which this amax is the i-th."""
        self._started = reduction, i, backward_id()

    def take(self) -> torch.Tensor | None:
        """The global amax, fp32, 0-dim; ``None`` if none was found in this backward pass."""
        if self._siblings.awaits(self):
            self._siblings.reduce()
        started, self._started = self._started, None
        if started is None:
            return None
        reduction, i, backward = started
        return reduction.values()[i] if backward == backward_id() else None


class _JointReduction:
    """One all-reduce of several amaxes, fp32, 0-dim."""

    def __init__(self, amaxes: list[torch.Tensor], groups: GroupNames) -> None:
        vector = amaxes[0] if len(amaxes) == 1 else torch.stack(amaxes)
        self._reduction = AmaxReduction(vector, groups)
        self._values: list[torch.Tensor] | None = None

    def values(self) -> list[torch.Tensor]:
        """Wait for the global amaxes, and return them."""
        if self._values is None:
            found = self._reduction.wait()
            self._values = [found] if found.ndim == 0 else list(found.unbind())
        return self._values
