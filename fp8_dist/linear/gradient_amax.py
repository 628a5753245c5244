"""Global amaxes of output gradients, reduced before the GEMMs ask for them, and several at once.

``wq``, ``wk`` and ``wv`` of an attention, ``w1`` and ``w3`` of a feed-forward take one input that
was cast before: they are *siblings*. By default autograd runs the backward of each as soon as its
gradient is there, with an all-reduce of its own. Here the GEMMs of siblings run after the gradients
of all of them are there, and one all-reduce serves them.

The backward of a call of a layer is in two functions (:mod:`fp8_dist.linear.autograd`). The first
takes the local amax (:meth:`GradientAmax.find`); the last sibling to do so starts the all-reduce.
The second one waits for it (:meth:`GradientAmax.take`). If a sibling takes no part in a backward
pass, the first GEMM that needs an amax starts the all-reduce of those that were found.

Of the nodes that are ready, autograd runs the one with the largest sequence number: the one that
was made last. The GEMMs' nodes of siblings get numbers from before the module that they are in
(:func:`fp8_dist.tensor_parallel.PrepareFloat8ModuleInput` makes the :class:`Siblings`):

- All nodes that lead to an output gradient of a sibling were made later, so they run earlier. This
  holds for any graph, also if other ranks have nodes besides.
- What was made before the module runs after the GEMMs, as it does if they are not moved: FSDP2's
  post-backward of the module, and of modules around it. FSDP2's nodes of modules inside it were
  made later, so a layer there is not a sibling.
- Siblings keep the order that autograd gives them: the one that was called last comes first. (A
  layer that takes the same input and is not a sibling comes before all of them. The gradient of the
  input is summed in this order.)

Numbers are reserved for one call of each layer. If a layer is called again, the last calls share a
number, and their order is undefined. So only layers whose backward GEMMs issue no collective are
siblings: the input and the output gradient are where they are needed.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from fp8_dist.cast import amax_groups, local_amax
from fp8_dist.granularity import TENSOR
from fp8_dist.mesh import AmaxReduction, GroupNames, Placements, local_tensor, ranks_of
from fp8_dist.torch_internals import (
    backward_id,
    reserve_sequence_number,
    set_sequence_number,
)


class Siblings:
    """The calls of layers in one call of the module that their input was cast for.

    Args:
        places: how many calls keep their order; 0 for a call without siblings, which is not moved.
    """

    def __init__(self, places: int = 0) -> None:
        self._places, self._calls = places, 0
        self._numbers = [reserve_sequence_number() for _ in range(places)]
        self._backward = -1  # the one in which amaxes were found
        self._found: dict[GradientAmax, _Found] = {}

    def add(self, gemms: Any) -> int:
        """Add a call, and return its place; ``gemms``: the node of its GEMMs, which this moves."""
        self._calls += 1
        if self._numbers:
            set_sequence_number(gemms, self._numbers[min(self._calls, self._places) - 1])
        return self._calls

    def found(self, call: "GradientAmax", amax: torch.Tensor, groups: GroupNames) -> None:
        """Note a local amax; if it is the last one, start to reduce all of them."""
        if self._backward != backward_id():
            self._backward = backward_id()
            self._found.clear()  # of a backward that ended before it came to the GEMMs
        stream = torch.cuda.current_stream(amax.device) if amax.is_cuda else None
        self._found[call] = _Found(amax, groups, stream)
        if len(self._found) == self._calls:
            self.reduce()

    def awaits(self, call: "GradientAmax") -> bool:
        """Whether an amax was found in this backward, and its reduction did not start."""
        return call in self._found and self._backward == backward_id()

    def reduce(self) -> None:
        """Start to reduce the amaxes that were found: an all-reduce for each set of ranks."""
        found, self._found = self._found, {}
        together: dict[Hashable, list[GradientAmax]] = {}
        # In the order of the forward, which all ranks share.
        for call in sorted(found, key=lambda call: call.place):
            # (Nothing orders streams: what was found on one is used on that one.)
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
    """The amax of the output gradient of one call of a layer, over the mesh.

    Attributes:
        placements: where the GEMMs need the gradient.
        place: among the siblings.
    """

    def __init__(self, siblings: Siblings, placements: Placements, gemms: Any) -> None:
        self.placements, self.place = placements, siblings.add(gemms)
        self._siblings = siblings
        self._started: tuple[_JointReduction, int, int] | None = None

    def find(self, grad: torch.Tensor, axes: tuple[int, ...] | None) -> None:
        """Take the local amax of a gradient (a DTensor), if it is to be reduced over ``axes``."""
        if groups := amax_groups(grad, TENSOR, axes):
            self._siblings.found(self, local_amax(local_tensor(grad), TENSOR), groups)

    def started(self, reduction: "_JointReduction", i: int) -> None:
        """The reduction of the amax has started, with others: it is the i-th."""
        self._started = reduction, i, backward_id()

    def take(self) -> torch.Tensor | None:
        """The amax over the mesh, fp32, 0-dim; ``None`` if none was found in this backward."""
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
        """The maxima over the mesh; waits for them."""
        if self._values is None:
            found = self._reduction.wait()
            self._values = [found] if found.ndim == 0 else list(found.unbind())
        return self._values
