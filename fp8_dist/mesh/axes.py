"""Axes of several meshes that are slices of one root mesh, as digits of the global rank."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fp8_dist.mesh.layout import group_of


class Axis(NamedTuple):
    """A mesh axis as a digit of the global rank: ``rank // stride % size`` is the coordinate."""

    stride: int
    size: int

    def coordinate(self, rank: int) -> int:
        """The coordinate of a rank on this axis."""
        return rank // self.stride % self.size


def axes_of(mesh: DeviceMesh) -> tuple[Axis, ...]:
    """All axes of a mesh.

    Raises:
        NotImplementedError: its ranks don't ascend in even steps.
    """
    return tuple(_axis(mesh, i) for i in range(mesh.ndim))


def union_of(meshes: Iterable[DeviceMesh]) -> list[Axis]:
    """The axes (of size 2 or more) that any of the meshes has, strides falling.

    Raises:
        NotImplementedError: axes overlap, such as a flattened one beside one that it was made of.
    """
    meshes = list(meshes)
    union = sorted({a for mesh in meshes for a in axes_of(mesh) if a.size > 1}, reverse=True)
    for outer, inner in pairwise(union):
        if inner.stride * inner.size > outer.stride or outer.stride % inner.stride:
            shown = "; ".join(sorted({str(mesh) for mesh in meshes}))
            raise NotImplementedError(
                "weights live on meshes whose axes overlap "
                f"({shown}); use meshes sliced from one root mesh, and flattened axes for all "
                "weights or for none"
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
            f"weights live on several meshes, and {mesh} does "
            "not enumerate its ranks in ascending, even steps; slice all of them from one "
            "init_device_mesh"
        )
    return Axis(stride, len(ranks))
