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
was made last. The GEMMs' nodes of siblings get numbers right behind the node that cast their input:

- All nodes that lead to an output gradient of a sibling were made later, so they run earlier. This
  holds for any graph, also if other ranks have nodes besides.
- The node that cast the input needs the gradients of all siblings, so it runs after the GEMMs.
- What was made before the cast runs after the GEMMs, as it does if they are not moved: FSDP2's
  post-backward of the module whose input was cast, and of modules around it. FSDP2's nodes of
  modules inside it were made after the cast, so layers there are not siblings
  (:mod:`fp8_dist.linear.prepared_input`).
- The order of the GEMMs, in which gradients of the input are summed, is that of autograd: the layer
  that was called last comes first.

Numbers are reserved before it is known who takes the input. If more calls come, the last ones share
a number, and their order is undefined. So only layers whose backward GEMMs issue no collective are
siblings: the input and the output gradient are where they are needed.
"""

from typing import Any

import torch

from fp8_dist.cast import amax_groups, local_amax
from fp8_dist.granularity import TENSOR
from fp8_dist.mesh import AmaxReduction, GroupNames, Placements, local_tensor
from fp8_dist.torch_internals import make_node, sequence_number, set_sequence_number


class Siblings:
    """The calls of layers that take one input.

    Args:
        node: the autograd node that casts it, just made; ``None`` for a call without siblings.
        places: how many calls keep their order.
    """

    def __init__(self, node: Any = None, places: int = 0) -> None:
        self._number = None if node is None else sequence_number(node)
        self._places, self._calls = places, 0
        for _ in range(places):
            make_node()  # which takes a number
        self._found: dict[GradientAmax, tuple[torch.Tensor, GroupNames]] = {}

    def add(self, gemms: Any) -> int:
        """Add a call, and return its place; ``gemms``: the node of its GEMMs, which this moves."""
        self._calls += 1
        if self._number is not None:
            set_sequence_number(gemms, self._number + min(self._calls, self._places))
        return self._calls

    def found(self, call: "GradientAmax", amax: torch.Tensor, groups: GroupNames) -> None:
        """Note a local amax; if it is the last one, start to reduce all of them."""
        self._found[call] = amax, groups
        if len(self._found) == self._calls:
            self.reduce()

    def awaits(self, call: "GradientAmax") -> bool:
        """Whether the amax of a call was found, and its reduction did not start."""
        return call in self._found

    def reduce(self) -> None:
        """Start to reduce the amaxes that were found: an all-reduce for each set of groups."""
        found, self._found = self._found, {}
        # In the order of the forward, which all ranks share.
        calls = sorted(found, key=lambda call: call.place)
        for groups in dict.fromkeys(found[call][1] for call in calls):
            chosen = [call for call in calls if found[call][1] == groups]
            joint = _JointReduction([found[call][0] for call in chosen], groups)
            for i, call in enumerate(chosen):
                call.reduction = joint, i


class GradientAmax:
    """The amax of the output gradient of one call of a layer, over the mesh.

    Attributes:
        placements: where the GEMMs need the gradient.
        place: among the siblings.
        reduction: where to find the amax, and at which place, once its reduction has started.
    """

    def __init__(self, siblings: Siblings, placements: Placements, gemms: Any) -> None:
        self.placements, self.place = placements, siblings.add(gemms)
        self.reduction: tuple[_JointReduction, int] | None = None
        self._siblings = siblings

    def find(self, grad: torch.Tensor, axes: tuple[int, ...] | None) -> None:
        """Take the local amax of a gradient (a DTensor), if it is to be reduced over ``axes``."""
        self.reduction = None
        if groups := amax_groups(grad, TENSOR, axes):
            self._siblings.found(self, local_amax(local_tensor(grad), TENSOR), groups)

    def take(self) -> torch.Tensor | None:
        """The amax over the mesh, fp32, 0-dim; ``None`` if none was found since the last time."""
        if self._siblings.awaits(self):
            self._siblings.reduce()
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
