"""Layouts of tensors on a mesh, gathers of tensors, and reductions of amaxes over it.

Other packages import from here. All amaxes are reduced in this package. ``torch_internals`` is the
only other part of the library that it imports.
"""

from fp8_dist.mesh.amax import (
    GroupNames as GroupNames,
    all_reduce_max as all_reduce_max,
    common_groups as common_groups,
    groups_over as groups_over,
    make_amax_group as make_amax_group,
    make_group as make_group,
)
from fp8_dist.mesh.gather import full_tensors as full_tensors
from fp8_dist.mesh.layout import (
    Layout as Layout,
    Pieces as Pieces,
    Placements as Placements,
    as_dtensor as as_dtensor,
    check_axis as check_axis,
    has_strided_placements as has_strided_placements,
    layout_over as layout_over,
    local_tensor as local_tensor,
    narrowed as narrowed,
    normalized as normalized,
    local_pieces as local_pieces,
    this_rank as this_rank,
    redistributed as redistributed,
    reduced as reduced,
    regions as regions,
    sharded_dim as sharded_dim,
    taken as taken,
    with_local as with_local,
)
from fp8_dist.mesh.rules import linear_layouts as linear_layouts
