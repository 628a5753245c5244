"""Every weight's scale from one all-reduce, after the optimizer step.

One fp32 vector per process holds the local amax of every float8 weight; one MAX all-reduce over
the union of the axes on which any of them is sharded gives all global amaxes. A weight whose own
mesh lacks some of those axes may have other values at other coordinates on them, so it gets one
element (slot) per coordinate there, and fills in only its own: the others stay 0.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fp8_dist.freshness import after_step
from fp8_dist.linear import Float8Linear, float8_layers
from fp8_dist.scaling import amax, scaling_from_amax
from fp8_dist.sharding import all_reduce_max, group_of, group_over, local_tensor, sharded_axes
from fp8_dist.tensor import Float8Tensor


class _Axis(NamedTuple):
    """A mesh axis as a digit of the global rank: ``rank // stride % size`` is the coordinate."""

    stride: int
    size: int


class _Axes(NamedTuple):
    """The mesh of one weight: all its axes, and those (of size 2 or more) that shard it."""

    mesh: DeviceMesh | None
    axes: tuple[_Axis, ...]
    sharded: frozenset[_Axis]


@torch.no_grad()
def precompute_float8_dynamic_scale(module: nn.Module) -> None:
    """Compute the scales of all float8 weights of a model, once their values have changed.

    Call it on all ranks after ``optimizer.step()``; :func:`attach_precompute` does so by itself.
    The next forward and backward then need no amax collective for weights. It covers weights
    sharded by FSDP2, by tensor parallelism, by both, and not at all, in any mixture.

    Args:
        module: the model, or a part of it.

    Collectives: exactly one all-reduce (MAX) of 4 bytes per weight (more for weights that don't
    live on all axes, see above), none if no weight is sharded.

    Raises:
        ValueError: ``module`` has no converted layer, or a weight is not the 2-D parameter that
            the optimizer updates (FSDP1's flattened shards).
        NotImplementedError: weights on several meshes, one of which does not enumerate its ranks
            in even steps.
    """
    layers = {
        name or layer.fqn or "(the module itself)": layer
        for name, layer in float8_layers(module).items()
        if layer.config.operand_dtype("weight") is not None
    }
    if not layers:
        raise ValueError(
            "precompute_float8_dynamic_scale: the module has no Float8Linear with a float8 "
            "weight; call convert_to_float8_training first"
        )
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # unsharded weights are those of before the optimizer step
    _check_weights(layers)
    # Layers that share a weight share its amax.
    owners = {id(layer.weight): layer for layer in layers.values()}
    local = torch.stack([amax(layer.local_shard()) for layer in owners.values()])
    reduced = _reduce([layer.weight for layer in owners.values()], local)
    _store(list(layers.values()), dict(zip(owners, reduced, strict=True)))


def attach_precompute(optimizer: Optimizer, module: nn.Module) -> RemovableHandle:
    """Call :func:`precompute_float8_dynamic_scale` after every step of an optimizer.

    Args:
        optimizer: the optimizer of ``module``'s parameters.
        module: the model.

    Returns:
        A handle whose ``remove()`` ends it.

    Raises:
        ValueError: ``module`` has no converted layer.
    """
    if not float8_layers(module):
        raise ValueError(
            "attach_precompute: the module has no Float8Linear; call convert_to_float8_training "
            "first"
        )
    return after_step(optimizer, lambda: precompute_float8_dynamic_scale(module))


def _check_weights(layers: dict[str, Float8Linear]) -> None:
    flat = [n for n, layer in layers.items() if layer.weight.ndim != 2]
    if flat:
        raise ValueError(
            "precompute_float8_dynamic_scale: these weights are flattened shards, as FSDP1 keeps "
            f"them, and have no scale of their own: {', '.join(flat)}. Use fully_shard (FSDP2), "
            "or leave precompute out: the layers scale what FSDP1 gathers"
        )
    unsharded = [n for n, m in layers.items() if isinstance(local_tensor(m.weight), Float8Tensor)]
    if unsharded:
        raise ValueError(
            "precompute_float8_dynamic_scale: these weights are unsharded float8 copies: "
            f"{', '.join(unsharded)}. Call it on the root module, or reshard() the FSDP modules "
            "that hold them first"
        )


def _reduce(weights: Sequence[torch.Tensor], local: torch.Tensor) -> torch.Tensor:
    """Global amaxes of the weights from their local ones (both ``[len(weights)]``, fp32)."""
    axes_of: dict[int, tuple[_Axis, ...]] = {}  # by the identity of a mesh: weights share few
    meshes = [_axes(weight, axes_of) for weight in weights]
    union = sorted({axis for mesh in meshes for axis in mesh.sharded}, reverse=True)
    if not union:
        return local
    if len(union) > 1:
        # Axes on which a weight is replicated may be included: they lead to the whole world,
        # which has a process group.
        union = sorted({axis for mesh in meshes for axis in mesh.axes}, reverse=True)
    rank = dist.get_rank()
    sizes: list[int] = []
    mine: list[int] = []
    for mesh in meshes:
        # Along the axes of its own mesh a weight is one tensor; along the others there may be
        # as many as there are coordinates.
        outside = [axis for axis in union if axis not in mesh.axes]
        slots, slot = 1, 0
        for stride, size in outside:
            slots, slot = slots * size, slot * size + rank // stride % size
        mine.append(sum(sizes) + slot)
        sizes.append(slots)
    index = torch.tensor(mine, device=local.device)
    vector = local.new_zeros(sum(sizes)).index_copy_(0, index, local)
    return all_reduce_max(vector, _group(union, meshes, rank)).index_select(0, index)


def _axes(weight: torch.Tensor, axes_of: dict[int, tuple[_Axis, ...]]) -> _Axes:
    if not isinstance(weight, DTensor):
        return _Axes(None, (), frozenset())
    mesh = weight.device_mesh
    if id(mesh) not in axes_of:
        axes_of[id(mesh)] = tuple(
            _Axis(_stride(mesh, axis), mesh.size(axis)) for axis in range(mesh.ndim)
        )
    axes = axes_of[id(mesh)]
    sharded = frozenset(axes[i] for i in sharded_axes(weight.placements) if axes[i].size > 1)
    return _Axes(mesh, axes, sharded)


def _stride(mesh: DeviceMesh, axis: int) -> int:
    """The distance between neighbours on an axis, in global ranks."""
    ranks = mesh.mesh.movedim(axis, 0).reshape(mesh.size(axis), -1)[:, 0].tolist()
    steps = {b - a for a, b in pairwise(ranks)}
    if len(steps) > 1 or any(step < 0 for step in steps):
        raise NotImplementedError(
            f"precompute_float8_dynamic_scale: {mesh} does not enumerate its ranks in ascending, "
            "even steps; build it with init_device_mesh"
        )
    return steps.pop() if steps else 1


def _group(axes: Sequence[_Axis], meshes: Sequence[_Axes], rank: int) -> dist.ProcessGroup:
    """The group of all ranks that differ from this one only along the given axes."""
    for known in meshes:
        if known.mesh is not None and set(axes) <= set(known.axes):
            return group_over(known.mesh, tuple(sorted(known.axes.index(a) for a in axes)))
    ranks = [rank - sum(rank // stride % size * stride for stride, size in axes)]
    for stride, size in axes:
        ranks = [base + i * stride for base in ranks for i in range(size)]
    return group_of(ranks, "float8_amax")


def _store(layers: Sequence[Float8Linear], amax_of: dict[int, torch.Tensor]) -> None:
    kinds: dict[tuple[torch.dtype | None, bool], list[Float8Linear]] = {}
    for layer in layers:
        config = layer.config
        kind = (config.operand_dtype("weight"), config.round_scales_to_power_of_2)
        kinds.setdefault(kind, []).append(layer)
    for (dtype, power_of_2), same in kinds.items():
        assert dtype is not None
        amaxes = torch.stack([amax_of[id(layer.weight)] for layer in same])
        multipliers, scales = scaling_from_amax(amaxes, dtype, power_of_2)
        for i, layer in enumerate(same):
            layer.weight_cache.store(layer.weight, (multipliers[i], scales[i]), precomputed=True)
