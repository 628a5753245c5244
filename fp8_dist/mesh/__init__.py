"""Where tensors live on a mesh, and what is reduced over it.

* ``layout``: a tensor's mesh and placements, its local part, sizes and offsets of the shards
* ``rules``: placements of every operand and result of a linear layer (the table)
* ``groups``: process groups over the axes of one mesh, or of several
* ``amax``: the reduction of amaxes; no other room reduces them

Other rooms import from here. Below this room: ``torch_internals``.
"""

from fp8_dist.mesh.amax import (
    AmaxReduction,
    all_reduce_max,
    group_for_amax,
    reduce_amax,
    sharded_axes,
)
from fp8_dist.mesh.groups import axes_of, group_along, union_of
from fp8_dist.mesh.layout import (
    Layout,
    Placements,
    global_offset,
    is_shard,
    local_sizes,
    local_tensor,
    reduced,
)
from fp8_dist.mesh.rules import LinearLayouts, linear_layouts

__all__ = [
    "AmaxReduction",
    "Layout",
    "LinearLayouts",
    "Placements",
    "all_reduce_max",
    "axes_of",
    "global_offset",
    "group_along",
    "group_for_amax",
    "is_shard",
    "linear_layouts",
    "local_sizes",
    "local_tensor",
    "reduce_amax",
    "reduced",
    "sharded_axes",
    "union_of",
]
