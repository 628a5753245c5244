"""Process groups over which the amaxes of a whole model are reduced."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from fp8_dist.mesh import Axis, GroupNames, axes_of, groups_over, make_group, union_of


class CommonGroups(NamedTuple):
    """Groups for tensors on several meshes.

    Attributes:
        groups: the groups to reduce over, one after the other; none if there is nothing to reduce.
        missing: for each mesh, the axes of the groups that it lacks. A tensor on that mesh may have
            other values at other coordinates on these axes.
    """

    groups: GroupNames
    missing: dict[DeviceMesh, list[Axis]]


def common_groups(axes: Mapping[DeviceMesh, Collection[int]]) -> CommonGroups:
    """Return the groups for the axes to reduce over, by mesh; several meshes use all their axes.

    It is one group, except in the cases that :func:`fp8_dist.mesh.make_group` describes.

    Collectives: those of ``make_group``, where there are several axes.

    Raises:
        NotImplementedError: several meshes that are not slices of one root mesh.
    """
    if not axes:
        return CommonGroups((), {})
    if len(axes) == 1:
        ((mesh, own),) = axes.items()
        if len(own) > 1:
            make_group([mesh])
        # Axes on which a tensor is replicated may be included.
        return CommonGroups(groups_over(mesh, sorted(own), replicated=range(mesh.ndim)), {})
    union = union_of(axes)
    has = {mesh: axes_of(mesh) for mesh in axes}
    missing = {mesh: [axis for axis in union if axis not in has[mesh]] for mesh in axes}
    return CommonGroups(make_group(axes), missing)


def make_amax_group(mesh: DeviceMesh) -> None:
    """Make the process group over all axes of a mesh, such as those of a pipeline's stage.

    It is optional. The first precompute or sync makes the group, if it reduces over several axes
    that do not span the world. All ranks of the world take part then. If some of them never get
    there, call this function on all ranks, after ``init_device_mesh``. Examples are a stage without
    float8 layers, or one whose weights are sharded over other axes.

    Args:
        mesh: a slice of a mesh of all ranks of the world; the same slice on all ranks, such as
            ``mesh["dp", "tp"]``.

    Collectives: if there is no such group yet, those of ``torch.distributed.new_group``, for this
    group and for each one beside it.
    """
    make_group([mesh])
