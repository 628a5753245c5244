"""How amax, cast and GEMM propagate over a mesh, and the one place that reduces amax.

The rules are pure functions of placements, one mesh axis at a time; nothing here decides by
values, so every rank decides alike.

===========  ============  ==========  ===========  ================  ===================
weight       input needed  output      grad_output  grad_input        grad_weight
===========  ============  ==========  ===========  ================  ===================
Replicate    Replicate     Replicate   Replicate    Replicate         Replicate
Replicate    Shard(d)      Shard(d)    Shard(d)     Shard(d)          Partial
Shard(0)     Replicate     Shard(-1)   Shard(-1)    Partial           Shard(0)
Shard(1)     Shard(-1)     Partial     Replicate    Shard(-1)         Shard(1)
===========  ============  ==========  ===========  ================  ===================

(``d`` is any dim of the input but the last; a float8 operand that is elsewhere is redistributed
to where it is needed as float8.) A cast keeps the placements of its input; its amax is reduced
over the axes on which the input is sharded, and over no others.
"""

import atexit
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from fp8_dist.torch_internals import (
    AsyncCollectiveTensor,
    StridedShard,
    compute_local_shape_and_global_offset,
    dtensor_local,
    funcol,
    make_dtensor,
)

Placements = tuple[Placement, ...]


class Layout(NamedTuple):
    """Where a tensor lives: the part of a DTensor that is not data."""

    mesh: DeviceMesh
    placements: Placements
    shape: torch.Size

    @staticmethod
    def of(tensor: torch.Tensor | None) -> "Layout | None":
        """The layout of a DTensor, ``None`` of anything else."""
        if not isinstance(tensor, DTensor):
            return None
        return Layout(tensor.device_mesh, tuple(tensor.placements), tensor.shape)

    def wrap(self, local: torch.Tensor) -> DTensor:
        """The DTensor of this layout with the given local tensor. No collectives."""
        return make_dtensor(local, self.mesh, self.placements, self.shape)


class LinearLayouts(NamedTuple):
    """Placements of every operand and result of a linear layer, one per mesh axis."""

    input: Placements
    output: Placements
    grad_output: Placements
    grad_input: Placements
    grad_weight: Placements


@register_sharding(torch.ops.aten.dequantize.self)
def _dequantize_rule(x: Any) -> list[tuple[list[Placement], list[Placement]]]:
    """Rows of (placements of the result, placements of the input) on one axis: elementwise."""
    replicated: list[tuple[list[Placement], list[Placement]]] = [([Replicate()], [Replicate()])]
    return replicated + [([Shard(d)], [Shard(d)]) for d in range(len(x.shape))]


def is_shard(placement: Placement) -> bool:
    """True for Shard and for the strided shards of FSDP2 over TP."""
    return isinstance(placement, (Shard, StridedShard))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local tensor (waits for it where a collective is in flight), else ``tensor``."""
    local = dtensor_local(tensor) if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def sharded_axes(
    placements: Sequence[Placement], ndim: int, dims: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The mesh axes over which the amax of a tensor with these placements is reduced.

    Args:
        placements: one per axis.
        ndim: the tensor's number of dims.
        dims: what a scale covers (``None``: all dims); shards of others have scales of their own.
    """
    return tuple(
        axis
        for axis, p in enumerate(placements)
        if is_shard(p) and (dims is None or p.dim % ndim in dims)  # type: ignore[attr-defined]
    )


def local_sizes(layout: Layout, dim: int) -> set[int]:
    """The sizes that a dim has on the ranks of a mesh; the same answer on all of them."""
    sizes = {layout.shape[dim]}
    for axis, p in enumerate(layout.placements):
        if is_shard(p) and p.dim % len(layout.shape) == dim % len(layout.shape):  # type: ignore[attr-defined]
            n = layout.mesh.size(axis)
            # As torch.chunk: equal chunks of the size rounded up, then what is left, then none.
            sizes = {
                min(chunk, max(size - rank * chunk, 0))
                for size in sizes
                for chunk in [-(-size // n)]
                for rank in range(n)
            }
    return sizes


def global_offset(layout: Layout, dim: int) -> int:
    """Where this rank's shard begins in the global tensor, along a dim. (0 for an empty shard.)"""
    shape, offset = compute_local_shape_and_global_offset(
        layout.shape, layout.mesh, layout.placements
    )
    return offset[dim] if shape[dim] else 0


def reduced(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without Partial placements: the values that a cast may look at.

    All-reduces, in high precision, over each axis on which a DTensor is Partial.
    """
    if not isinstance(tensor, DTensor) or not any(p.is_partial() for p in tensor.placements):
        return tensor
    return tensor.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in tensor.placements]
    )


def linear_layouts(
    input: Sequence[Placement], weight: Sequence[Placement], input_ndim: int, fqn: str = ""
) -> LinearLayouts:
    """The table at the top of this module, for each mesh axis.

    Args:
        input: placements of the input as it comes (Partial allowed: it will be reduced).
        weight: placements of the ``[out_features, in_features]`` weight on the same mesh.
        input_ndim: number of dims of the input.
        fqn: the layer's name, for the error.

    Raises:
        ValueError: for a weight placement that no linear layer can compute with.
    """
    last = input_ndim - 1
    rows: list[Placements] = []
    for p_input, p_weight in zip(input, weight, strict=True):
        if p_weight.is_replicate():
            batch = is_shard(p_input) and p_input.dim % input_ndim != last  # type: ignore[attr-defined]
            where = Shard(p_input.dim % input_ndim) if batch else Replicate()  # type: ignore[attr-defined]
            rows.append((where, where, where, where, Partial() if batch else Replicate()))
        elif p_weight == Shard(0):
            rows.append((Replicate(), Shard(last), Shard(last), Partial(), Shard(0)))
        elif p_weight == Shard(1):
            rows.append((Shard(last), Partial(), Replicate(), Shard(last), Shard(1)))
        else:
            raise ValueError(
                f"{fqn or 'Float8Linear'}: a weight placed as {p_weight} can't be multiplied; "
                "distribute it as Replicate(), Shard(0) (column-parallel) or Shard(1) "
                "(row-parallel)"
            )
    return LinearLayouts(*(tuple(column) for column in zip(*rows, strict=True)))


def reduce_amax(
    amax: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int], replicated: Sequence[int] = ()
) -> torch.Tensor:
    """Maximum of ``amax`` over the given mesh axes.

    Args:
        amax: fp32, non-negative or NaN, any shape; the local amax of each scale.
        mesh: the mesh that the tensor is distributed over.
        axes: the axes on which it is sharded; none returns ``amax`` itself.
        replicated: axes along which the tensor is the same: they may be included.

    Returns:
        fp32 tensor of the same shape. One all-reduce of 4 bytes per element, whatever the number
        of axes.
    """
    group = group_for_amax(mesh, axes, replicated)
    return amax if group is None else all_reduce_max(amax, group.group_name)


# What nobody has waited for: torch complains of it at the end of the process.
_under_way: dict[int, torch.Tensor] = {}


@atexit.register
def _wait_for_the_rest() -> None:
    while _under_way:
        with suppress(Exception):  # another rank may be gone
            waited_max(next(iter(_under_way.values())))


def group_for_amax(
    mesh: DeviceMesh, axes: Sequence[int], replicated: Sequence[int] = ()
) -> dist.ProcessGroup | None:
    """The group that :func:`reduce_amax` reduces over; ``None`` if there is nothing to reduce."""
    axes = [axis for axis in axes if mesh.size(axis) > 1]
    if len(axes) > 1:
        axes = sorted({*axes, *replicated})  # nearer to a group that exists: the world
    return group_over(mesh, tuple(axes)) if axes else None


def all_reduce_max(amax: torch.Tensor, group_name: str) -> torch.Tensor:
    """All-reduce (MAX) of non-negative fp32 values that keeps a NaN of any rank."""
    return waited_max(start_all_reduce_max(amax, group_name))


def start_all_reduce_max(amax: torch.Tensor, group_name: str) -> torch.Tensor:
    """:func:`all_reduce_max`, begun: :func:`waited_max` of the result ends it.

    Backends may drop a NaN in a MAX. The bits of a non-negative float, read as an integer, are
    ordered like the floats, with NaN above infinity, so the reduction runs on int32.
    """
    bits = funcol.all_reduce(amax.view(torch.int32), "max", group_name)
    if not torch.compiler.is_compiling():
        _under_way[id(bits)] = bits
    return bits


def waited_max(bits: torch.Tensor) -> torch.Tensor:
    """The result of :func:`start_all_reduce_max`, fp32."""
    if not torch.compiler.is_compiling():
        _under_way.pop(id(bits), None)
    return funcol.wait_tensor(bits).view(torch.float32)


# Groups over several mesh axes that had to be made, by their ranks; with the world they belong
# to, since a group dies with destroy_process_group.
_axis_groups: dict[tuple[int, ...], tuple[Any, dist.ProcessGroup]] = {}


def group_over(mesh: DeviceMesh, axes: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of this rank over some axes of a mesh.

    A single axis has one already; so does the whole world. For other products, such as all axes
    of a pipeline stage, a group of exactly those ranks is made on first use, and kept. No other
    rank takes part in making it; the ranks that do must have made the same number of groups
    before, as torch names groups by that number.
    """
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    world = dist.group.WORLD
    assert world is not None, "no default process group"
    if math.prod(mesh.size(axis) for axis in axes) == world.size():
        # Without reading the mesh's ranks: under FakeTensorMode they have no values.
        return world
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the mesh"
    index = tuple(slice(None) if axis in axes else coordinate[axis] for axis in range(mesh.ndim))
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    return group_of(mesh.mesh[index].flatten().tolist(), "+".join(names[axis] for axis in axes))


def group_of(ranks: Sequence[int], description: str) -> dist.ProcessGroup:
    """The (cached) process group of exactly these global ranks, of which this one must be one."""
    world = dist.group.WORLD
    assert world is not None, "no default process group"
    if len(ranks) == world.size():
        return world
    key = tuple(sorted(ranks))
    known = _axis_groups.get(key)
    if known is None or known[0] is not world:
        group = dist.new_group(
            list(key), use_local_synchronization=True, group_desc=f"mesh_{description}"
        )
        known = _axis_groups[key] = (world, group)
    return known[1]
