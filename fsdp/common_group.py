"""The one process group over which the amaxes of a whole model are reduced."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fp8_dist.mesh import Axis, axes_of, group_along, group_for_amax, union_of


class CommonGroup(NamedTuple):
    """A group for tensors on several meshes.

    Attributes:
        group: ``None`` if there is nothing to reduce.
        missing: the axes of ``group`` that a mesh lacks, if it lacks any. A tensor on that mesh may
            have other values at other coordinates on them.
    """

    group: dist.ProcessGroup | None
    missing: dict[DeviceMesh, list[Axis]]


def common_group(axes: Mapping[DeviceMesh, Collection[int]]) -> CommonGroup:
    """The group over the axes to reduce over, by mesh; of several meshes, over all of their axes.

    Raises:
        NotImplementedError: several meshes that are not slices of one root mesh.
    """
    if len(axes) == 1:
        ((mesh, own),) = axes.items()
        # Axes on which a tensor is replicated may be included.
        group = group_for_amax(mesh, sorted(own), replicated=range(mesh.ndim))
        return CommonGroup(group, {})
    union = union_of(axes)
    has = {mesh: axes_of(mesh) for mesh in axes}
    missing = {mesh: [axis for axis in union if axis not in has[mesh]] for mesh in axes}
    return CommonGroup(group_along(union, dist.get_rank()) if union else None, missing)
