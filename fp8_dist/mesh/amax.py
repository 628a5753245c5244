"""Process groups over mesh axes, and the reduction of amaxes over them.

No other module reduces amaxes. The world has a group, and each axis of a mesh has one that its mesh
created. A group over several axes, such as all axes of a pipeline stage, has to be created, and
with NCCL all ranks of the world may have to take part in that (ncclCommSplit). Groups are therefore
created at one defined time, in :func:`make_group`, which precompute and sync call between two
steps. Forward and backward only use existing groups (:func:`groups_over`), because ranks may wait
for each other there, as the stages of a pipeline do.

To compare the axes of several meshes, an :class:`Axis` describes each one as a digit of the global
rank.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fp8_dist.torch_internals import funcol, root_mesh

# The groups to reduce over, one after the other, by name.
GroupNames = tuple[str, ...]


class Axis(NamedTuple):
    """A mesh axis as a digit of the global rank."""

    stride: int
    size: int

    def coordinate(self, rank: int) -> int:
        """The coordinate of a rank on this axis."""
        return rank // self.stride % self.size

    def covers(self, other: "Axis") -> bool:
        """Return whether another axis is a part of this one."""
        return self.stride <= other.stride and other.stride * other.size <= self.stride * self.size


# Names of the groups that this module has created, by default group and by axes. They are dropped
# when the default group is freed.
_made: "WeakKeyDictionary[dist.ProcessGroup, dict[frozenset[Axis], str]]" = WeakKeyDictionary()


def groups_over(
    mesh: DeviceMesh, axes: Sequence[int], replicated: Sequence[int] = ()
) -> GroupNames:
    """The groups of this rank over some axes of a mesh.

    The result is one group if there is one over all of the axes: the world, or a group that
    :func:`make_group` created. It may include axes along which values are ``replicated``. Otherwise
    the result is one group per axis. Axes of size 1 are left out.

    Collectives: none.
    """
    if len(axes) == 1 and mesh.size(axes[0]) > 1:
        return (str(mesh.get_group(axes[0]).group_name),)
    axes = [axis for axis in axes if mesh.size(axis) > 1]
    if len(axes) > 1:
        for spanned in ({*axes, *replicated}, axes):
            if (name := _existing_group(mesh, spanned)) is not None:
                return (name,)
    return tuple(str(mesh.get_group(axis).group_name) for axis in axes)


def make_group(meshes: Collection[DeviceMesh]) -> GroupNames:
    """The groups of this rank over all axes of meshes that are slices of one root mesh.

    The result is one group, which is created if it does not exist; or one group per axis, if the
    root mesh does not have all ranks of the world, or does not enumerate them in ascending, even
    steps.

    Collectives: if a group is created, all ranks of the world must take part, and create it
    together with the groups of other ranks over the same axes.

    Raises:
        NotImplementedError: the meshes are not slices of one root mesh.
    """
    first, *others = meshes
    if not others:
        existing = groups_over(first, range(first.ndim))
        if len(existing) < 2 or not _is_regular(first):
            return existing
    axes, world, root = union_of(meshes), _world(), root_mesh(first)
    if math.prod(axis.size for axis in axes) == world.size():
        return (str(world.group_name),)
    by_axis = {
        axis: (mesh, i) for mesh in meshes for i, axis in enumerate(axes_of(mesh)) if axis.size > 1
    }
    # A flattened axis replaces the axes that it covers.
    covered = {b for a in by_axis for b in by_axis if a != b and a.covers(b)}
    coarsest = [by_axis[axis] for axis in sorted(by_axis.keys() - covered, reverse=True)]
    if len(axes) > 1 and root.size() == world.size() and _is_regular(root):
        groups = _made.setdefault(world, {})
        if frozenset(axes) not in groups:
            names = "+".join((mesh.mesh_dim_names or "?" * mesh.ndim)[i] for mesh, i in coarsest)
            groups[frozenset(axes)] = _make_beside_each_other(axes, names)
        return (groups[frozenset(axes)],)
    return tuple(str(mesh.get_group(i).group_name) for mesh, i in coarsest)


def common_groups(
    axes: Mapping[DeviceMesh, Collection[int]],
) -> tuple[GroupNames, dict[DeviceMesh, list[Axis]]]:
    """Return the groups to reduce over, for the given axes of each mesh.

    If there are several meshes, the groups span all axes of each. The result is one group, except
    in the cases that :func:`make_group` describes; none if there is nothing to reduce.

    The second result has, for each of several meshes, the groups' axes that the mesh lacks. The
    values of a tensor on that mesh may differ along these axes.

    Collectives: those of ``make_group``, if there are several axes.

    Raises:
        NotImplementedError: several meshes that are not slices of one root mesh.
    """
    if not axes:
        return (), {}
    if len(axes) == 1:
        ((mesh, indices),) = axes.items()
        if len(indices) > 1:
            make_group([mesh])
        # Axes on which a tensor is replicated may be included.
        return groups_over(mesh, sorted(indices), replicated=range(mesh.ndim)), {}
    union = union_of(axes)
    missing = {}
    for mesh in axes:
        has = axes_of(mesh)
        missing[mesh] = [part for part in union if not any(axis.covers(part) for axis in has)]
    return make_group(axes), missing


def make_amax_group(mesh: DeviceMesh) -> None:
    """Create the process group over all axes of a mesh, such as those of a pipeline stage.

    Calling this function is usually not necessary: the first precompute or sync creates the group
    if it reduces over several axes that do not span the world. All ranks of the world must take
    part in that. If some of them do not call precompute or sync, call this function on all ranks,
    after ``init_device_mesh``. Examples are a stage without float8 layers, or one whose weights are
    sharded over other axes.

    Args:
        mesh: a slice of a mesh of all ranks of the world; the same slice on all ranks, such as
            ``mesh["dp", "tp"]``.

    Collectives: if the group does not exist, those of ``torch.distributed.new_group``, for it and
    for each group of other ranks over the same axes.
    """
    make_group([mesh])


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "no default process group"
    return world


def _existing_group(mesh: DeviceMesh, axes: Iterable[int]) -> str | None:
    """The name of an existing group over all of the axes, or None."""
    world = _world()
    # Compare sizes before reading the mesh's ranks, which have no values under FakeTensorMode. The
    # list is there because dynamo does not support a generator here.
    if math.prod([mesh.size(axis) for axis in axes]) == world.size():
        return str(world.group_name)
    # Dynamo can't trace a lookup in a WeakKeyDictionary.
    groups = None if torch.compiler.is_compiling() else _made.get(world)
    if not groups or not _is_regular(mesh):
        return None
    digits = axes_of(mesh)
    return groups.get(frozenset(digits[i] for i in axes if digits[i].size > 1))


def _make_beside_each_other(axes: Sequence[Axis], names: str) -> str:
    """Create all groups over some axes of the world, and return the name of this rank's group."""
    size, group_of_rank = _world().size(), None
    for rank in range(size):
        if any(axis.coordinate(rank) for axis in axes):
            continue
        ranks = [rank]  # the first of a group
        for axis in axes:
            ranks = [base + i * axis.stride for base in ranks for i in range(axis.size)]
        # Unlike with use_local_synchronization, ranks outside the group take part.
        group = dist.new_group(ranks, group_desc=f"mesh_{names}")
        if dist.get_rank() in ranks:
            group_of_rank = group
    assert group_of_rank is not None, f"rank {dist.get_rank()} is in no group over {axes}"
    return str(group_of_rank.group_name)


def axes_of(mesh: DeviceMesh) -> tuple[Axis, ...]:
    """All axes of a mesh.

    Raises:
        NotImplementedError: the mesh's ranks don't ascend in even steps.
    """
    ranks = mesh.mesh
    first = int(ranks.flatten()[0])
    axes, expected = [], torch.tensor(first)
    for dim, size in enumerate(ranks.shape):
        stride = int(ranks.select(dim, 1).flatten()[0]) - first if size > 1 else 1
        axes.append(Axis(stride, size))
        expected = expected.unsqueeze(-1) + stride * torch.arange(size)
    starts_at_0 = all(axis.stride > 0 and axis.coordinate(first) == 0 for axis in axes)
    if not (starts_at_0 and torch.equal(ranks, expected)):
        raise NotImplementedError(
            f"weights live on several meshes, and {mesh} does not enumerate its ranks in "
            "ascending, even steps; slice all of them from one init_device_mesh"
        )
    return tuple(axes)


def _is_regular(mesh: DeviceMesh) -> bool:
    try:
        axes_of(mesh)
    except NotImplementedError:
        return False
    return True


def union_of(meshes: Collection[DeviceMesh]) -> list[Axis]:
    """The axes of size 2 or more of all meshes, by descending stride.

    An axis that covers others, such as a flattened axis, is divided into these and the rest.

    Raises:
        NotImplementedError: axes overlap in another way; or the ranks of a mesh don't ascend in
            even steps.
    """
    axes = {axis for mesh in meshes for axis in axes_of(mesh) if axis.size > 1}
    ends = sorted({end for axis in axes for end in (axis.stride, axis.stride * axis.size)})
    union: list[Axis] = []
    for begin, end in pairwise(ends):
        if not any(axis.stride <= begin and end <= axis.stride * axis.size for axis in axes):
            continue
        if end % begin:
            shown = "; ".join(sorted({str(mesh) for mesh in meshes}))
            raise NotImplementedError(
                f"weights live on meshes whose axes overlap ({shown}); use meshes sliced from one "
                "root mesh, and flattened axes of whole axes of it"
            )
        union.insert(0, Axis(begin, end // begin))
    return union


# The integers as which floats are reduced.
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def all_reduce_max(amax: torch.Tensor, groups: Sequence[str]) -> torch.Tensor:
    """All-reduce (MAX) fp32 amaxes (-1: no amax) or uint8 exponents. NaN on any rank is kept.

    Numbers in fp64 are reduced, too.

    Collectives: one all-reduce, of the bytes of ``amax``, for each group in turn.
    """
    # Backends may drop a NaN in a MAX, so floats are reduced as integers. The bits of non-negative
    # floats, read as integers, are ordered like the floats, with NaN above infinity, and those of
    # -1 are a negative integer. The largest uint8 exponent is NaN.
    for name in groups:
        bits = amax.view(_INTEGERS[amax.dtype]) if amax.is_floating_point() else amax
        amax = funcol.wait_tensor(funcol.all_reduce(bits, "max", name)).view(amax.dtype)
    return amax
