"""Layouts of tensors on a mesh, and reductions of amaxes over it.

Other packages import from here. All amaxes are reduced in this package. Of the library it imports
only ``torch_internals``.
"""

from fp8_dist.mesh.agreement import first_difference
from fp8_dist.mesh.amax import AmaxReduction, all_reduce_max, reduce_amax
from fp8_dist.mesh.groups import (
    GroupNames,
    common_groups,
    groups_over,
    make_amax_group,
    make_group,
)
from fp8_dist.mesh.layout import (
    Layout,
    Placements,
    global_offset,
    has_pieces,
    is_packed,
    layout_over,
    local_sizes,
    local_tensor,
    narrowed,
    normalized,
    reduced,
    shard_starts,
    sharded_dim,
    with_local,
)
from fp8_dist.mesh.rules import LinearLayouts, linear_layouts

__all__ = [
    "AmaxReduction",
    "GroupNames",
    "Layout",
    "LinearLayouts",
    "Placements",
    "all_reduce_max",
    "common_groups",
    "first_difference",
    "global_offset",
    "groups_over",
    "has_pieces",
    "is_packed",
    "layout_over",
    "linear_layouts",
    "local_sizes",
    "local_tensor",
    "make_amax_group",
    "make_group",
    "narrowed",
    "normalized",
    "reduce_amax",
    "reduced",
    "shard_starts",
    "sharded_dim",
    "with_local",
]
