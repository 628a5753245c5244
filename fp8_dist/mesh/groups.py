"""Process groups over the axes of one mesh, or of several meshes sliced from one root mesh.

Axes of several meshes are compared as digits of the global rank.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Groups that had to be made, by their ranks, for each default group: they die with it.
_made: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]" = (
    WeakKeyDictionary()
)


def group_over(mesh: DeviceMesh, axes: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of this rank over some axes of a mesh.

    A single axis has one already, and so does the whole world. For other products, such as all axes
    of a pipeline stage, :func:`group_of` makes one.
    """
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    if math.prod(mesh.size(axis) for axis in axes) == dist.get_world_size():
        # Without reading the mesh's ranks: under FakeTensorMode they have no values.
        return group_of(range(dist.get_world_size()), "world")
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the mesh"
    index = tuple(slice(None) if axis in axes else coordinate[axis] for axis in range(mesh.ndim))
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    return group_of(mesh.mesh[index].flatten().tolist(), "+".join(names[axis] for axis in axes))


def group_of(ranks: Sequence[int], description: str) -> dist.ProcessGroup:
    """The process group of exactly these global ranks, made on first use, and kept.

    This rank is one of them. No other rank takes part in making it. Those that do must have made
    the same number of groups before, as torch names groups by that number.
    """
    world = dist.group.WORLD
    assert world is not None, "no default process group"
    if len(ranks) == world.size():
        return world
    groups = _made.setdefault(world, {})
    key = tuple(sorted(ranks))
    if key not in groups:
        groups[key] = dist.new_group(
            list(key), use_local_synchronization=True, group_desc=f"mesh_{description}"
        )
    return groups[key]


class Axis(NamedTuple):
    """A mesh axis as a digit of the global rank."""

    stride: int
    size: int

    def coordinate(self, rank: int) -> int:
        """The coordinate of a rank on this axis."""
        return rank // self.stride % self.size


def axes_of(mesh: DeviceMesh) -> tuple[Axis, ...]:
    """All axes of a mesh; NotImplementedError if its ranks don't ascend in even steps."""
    return tuple(_axis(mesh, i) for i in range(mesh.ndim))


def union_of(meshes: Iterable[DeviceMesh]) -> list[Axis]:
    """The axes (of size 2 or more) that any of the meshes has, strides falling.

    NotImplementedError if axes overlap, such as a flattened one and one that it was made of.
    """
    meshes = list(meshes)
    union = sorted({a for mesh in meshes for a in axes_of(mesh) if a.size > 1}, reverse=True)
    for outer, inner in pairwise(union):
        if inner.stride * inner.size > outer.stride or outer.stride % inner.stride:
            shown = "; ".join(sorted({str(mesh) for mesh in meshes}))
            raise NotImplementedError(
                f"weights live on meshes whose axes overlap ({shown}); use meshes sliced from one "
                "root mesh, and flattened axes for all weights or for none"
            )
    return union


def group_along(axes: Sequence[Axis], rank: int) -> dist.ProcessGroup:
    """The group of all ranks that differ from this one only along the given axes."""
    ranks = [rank - sum(axis.coordinate(rank) * axis.stride for axis in axes)]
    for axis in axes:
        ranks = [base + i * axis.stride for base in ranks for i in range(axis.size)]
    return group_of(ranks, "float8_amax")


def _axis(mesh: DeviceMesh, axis: int) -> Axis:
    ranks = mesh.mesh.movedim(axis, 0).reshape(mesh.size(axis), -1)[:, 0].tolist()
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    regular = range(ranks[0], ranks[0] + stride * len(ranks), stride) if stride > 0 else range(0)
    if ranks != list(regular) or ranks[0] // stride % len(ranks) != 0:
        raise NotImplementedError(
            f"weights live on several meshes, and {mesh} does not enumerate its ranks in "
            "ascending, even steps; slice all of them from one init_device_mesh"
        )
    return Axis(stride, len(ranks))
