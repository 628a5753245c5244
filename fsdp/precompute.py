"""Every weight's scales from one all-reduce, after the optimizer step.

One fp32 vector per process holds the local amaxes of all float8 weights that need others' amaxes;
one MAX all-reduce over the union of the axes on which any of them is sharded gives the global ones.
A weight whose own mesh lacks some of those axes may have other values at other coordinates on them,
so it gets a part (slot) of the vector per coordinate there, and fills in only its own: the others
stay 0. Rows (and columns) with scales of their own stand at their global positions: so the scales
of all rows of a weight become known to all ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fp8_dist.casts import Cast, Covers
from fp8_dist.freshness import after_step
from fp8_dist.fsdp.mesh_axes import axes_of, group_along, union_of
from fp8_dist.fsdp.resharding import check_sharded_module
from fp8_dist.linear import Float8Linear, float8_layers
from fp8_dist.scaling import Scaling, amax, reduced_dims, scaling_from_amax
from fp8_dist.sharding import (
    Layout,
    all_reduce_max,
    global_offset,
    local_sizes,
    local_tensor,
    reduce_amax,
    sharded_axes,
)
from fp8_dist.tensor import Float8Tensor


class _Amaxes(NamedTuple):
    """The amaxes of one weight, in one of its casts.

    Attributes:
        layer: a layer that has the weight.
        covers: what one scale covers.
        local: of the local shard: 0-dim, ``[rows, 1]`` or ``[1, columns]``.
        size: how many there are of the global weight.
        offset: which of them is the first local one.
        axes: mesh axes of the weight that decide about them; empty if the local ones are global.
    """

    layer: Float8Linear
    covers: Covers
    local: torch.Tensor
    size: int
    offset: int
    axes: tuple[int, ...]


@torch.no_grad()
def precompute_float8_dynamic_scale(module: nn.Module) -> None:
    """Compute the scales of all float8 weights of a model, once their values have changed.

    Call it on all ranks after ``optimizer.step()``; :func:`attach_precompute` does so by itself.
    The next forward and backward then need no amax collective for weights. It covers weights
    sharded by FSDP2, by tensor parallelism, by both, and not at all, in any mixture.

    Args:
        module: the model, or a part of it.

    Collectives: exactly one all-reduce (MAX) of 4 bytes per scale that needs it (more for weights
    that don't live on all axes, see above), none if no scale does. With one scale per row these
    are the rows that are sharded along themselves (row-parallel weights), or unevenly by FSDP2.

    Raises:
        ValueError: ``module`` has no converted layer whose weight has a DYNAMIC scale, or a weight
            is not the 2-D parameter that the optimizer updates (FSDP1's flattened shards,
            parametrizations), or FSDP2 reshards to a smaller mesh after forward, which it can't do
            with float8 gathers.
        NotImplementedError: weights on several meshes that are not slices of one root mesh.
    """
    layers = _float8_layers(module, "precompute_float8_dynamic_scale")
    reshard(module)  # unsharded weights are those of before the optimizer step
    _check_weights(layers)
    # Layers that share a weight share its amaxes.
    amaxes: dict[tuple[int, Covers], _Amaxes] = {}
    for layer in layers.values():
        for cast in layer.config.casts("weight"):
            if (id(layer.weight), cast.covers) not in amaxes:
                amaxes[id(layer.weight), cast.covers] = _local_amaxes(layer, cast.covers)
    _store(list(layers.values()), dict(zip(amaxes, _reduce(list(amaxes.values())), strict=True)))


def reshard(module: nn.Module) -> None:
    """Put the sharded parameters of all FSDP modules back in place."""
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule):
            check_sharded_module(part, name or "the root")
            part.reshard()


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
    _float8_layers(module, "attach_precompute")
    return after_step(optimizer, lambda: precompute_float8_dynamic_scale(module))


def _float8_layers(module: nn.Module, caller: str) -> dict[str, Float8Linear]:
    """The layers of a module that take their weight in float8, by name."""
    layers = {
        name or layer.fqn: layer
        for name, layer in float8_layers(module).items()
        if any(not cast.delayed for cast in layer.config.casts("weight"))
    }
    if not layers:
        delayed = any(layer.histories for layer in float8_layers(module).values())
        raise ValueError(
            f"{caller}: the module has no Float8Linear with a float8 weight of dynamic scale; call "
            + (
                "sync_float8_amax_and_scale_history for DELAYED ones"
                if delayed
                else "convert_to_float8_training first"
            )
        )
    return layers


def _check_weights(layers: dict[str, Float8Linear]) -> None:
    computed = [n for n, layer in layers.items() if "weight" not in layer._parameters]
    flat = [n for n, m in layers.items() if n not in computed and m.weight.ndim != 2]
    if computed or flat:
        raise ValueError(
            "precompute_float8_dynamic_scale: these weights are not the parameters that an "
            f"optimizer updates: {', '.join(computed + flat)} (flattened shards, as FSDP1 keeps "
            "them, or parametrized). Use fully_shard (FSDP2), or leave precompute out: the layers "
            "scale what they get"
        )
    unsharded = [n for n, m in layers.items() if isinstance(local_tensor(m.weight), Float8Tensor)]
    if unsharded:
        raise ValueError(
            "precompute_float8_dynamic_scale: these weights are unsharded float8 copies: "
            f"{', '.join(unsharded)}. Call it on the root module, or reshard() the FSDP modules "
            "that hold them first"
        )


def _local_amaxes(layer: Float8Linear, covers: Covers) -> _Amaxes:
    local = amax(layer.local_shard(), covers)
    layout = Layout.of(layer.weight)
    if layout is None:
        return _Amaxes(layer, covers, local, local.numel(), 0, ())
    dim = {"tensor": None, "row": 0, "column": 1}[covers]
    over = sharded_axes(layout.placements, 2, reduced_dims(covers, 2))
    gathered = covers == "row" and layer.config.enable_fsdp_float8_all_gather
    if gathered and len(local_sizes(layout, 0)) > 1:
        # Scales of unequal parts don't fit into FSDP2's gather: all ranks are told all of them.
        over = sharded_axes(layout.placements, 2)
    axes = tuple(axis for axis in over if layout.mesh.size(axis) > 1)
    if dim is None:
        return _Amaxes(layer, covers, local, 1, 0, axes)
    return _Amaxes(layer, covers, local, layout.shape[dim], global_offset(layout, dim), axes)


def _reduce(amaxes: Sequence[_Amaxes]) -> list[tuple[_Amaxes, torch.Tensor | None]]:
    """Each with all of its amaxes of the global weight ``[size]``, or None where local ones do."""
    chosen = [a for a in amaxes if a.axes]
    if not chosen:
        return [(a, None) for a in amaxes]
    meshes = {_mesh(a) for a in chosen}
    reduce = _reduce_on_one_mesh if len(meshes) == 1 else _reduce_on_submeshes
    reduced = iter(reduce(chosen))
    return [(a, next(reduced) if a.axes else None) for a in amaxes]


def _mesh(amaxes: _Amaxes) -> DeviceMesh:
    weight = amaxes.layer.weight
    assert isinstance(weight, DTensor)
    return weight.device_mesh


def _at_global_positions(amaxes: _Amaxes) -> torch.Tensor:
    flat = amaxes.local.reshape(-1)
    after = amaxes.size - amaxes.offset - len(flat)
    return torch.nn.functional.pad(flat, (amaxes.offset, after)) if after or amaxes.offset else flat


def _reduce_on_one_mesh(amaxes: Sequence[_Amaxes]) -> Sequence[torch.Tensor]:
    mesh = _mesh(amaxes[0])
    vector = torch.cat([_at_global_positions(a) for a in amaxes])
    axes = {axis for a in amaxes for axis in a.axes}
    # Axes on which a weight is replicated may be included.
    vector = reduce_amax(vector, mesh, sorted(axes), replicated=range(mesh.ndim))
    return vector.split([a.size for a in amaxes])


def _reduce_on_submeshes(amaxes: Sequence[_Amaxes]) -> Sequence[torch.Tensor]:
    own = {mesh: axes_of(mesh) for mesh in {_mesh(a) for a in amaxes}}
    union = union_of(own)
    rank = dist.get_rank()
    sizes: list[int] = []
    parts: list[torch.Tensor] = []
    for a in amaxes:
        # Along the axes of its own mesh a weight is one tensor; along the others there may be
        # as many as there are coordinates.
        slots, slot = 1, 0
        for axis in union:
            if axis not in own[_mesh(a)]:
                slots, slot = slots * axis.size, slot * axis.size + axis.coordinate(rank)
        zeros = a.local.new_zeros(slots * a.size)
        zeros[slot * a.size : (slot + 1) * a.size] = _at_global_positions(a)
        parts.append(zeros)
        sizes += [slot * a.size, a.size, (slots - slot - 1) * a.size]
    vector = all_reduce_max(torch.cat(parts), group_along(union, rank).group_name)
    return vector.split(sizes)[1::3]


def _store(
    layers: Sequence[Float8Linear],
    reduced: dict[tuple[int, Covers], tuple[_Amaxes, torch.Tensor | None]],
) -> None:
    """Turn amaxes into scales, all of a kind at once, and leave them with their layers."""
    wanted: dict[tuple[torch.dtype, bool], list[tuple[Float8Linear, Cast]]] = {}
    for layer in layers:
        for cast in layer.config.casts("weight"):
            kind = (cast.dtype, layer.config.round_scales_to_power_of_2)
            wanted.setdefault(kind, []).append((layer, cast))
    scalings: dict[tuple[Float8Linear, Cast], Scaling] = {}
    for (dtype, power_of_2), same in wanted.items():
        found = [reduced[id(layer.weight), cast.covers] for layer, cast in same]
        values = [a.local.reshape(-1) if whole is None else whole for a, whole in found]
        sizes = [len(value) for value in values]
        multipliers, scales = scaling_from_amax(torch.cat(values), dtype, power_of_2)
        each = zip(same, multipliers.split(sizes), scales.split(sizes), strict=True)
        scalings |= {key: (m, scale) for key, m, scale in each}
    for layer in layers:
        local = {
            cast: _local_part(reduced[id(layer.weight), cast.covers][0], scalings[layer, cast])
            for cast in layer.config.casts("weight")
        }
        layer.weight_cache.store(layer.weight, local, "precompute")
        for cast in local:
            if cast.covers == "row" and reduced[id(layer.weight), "row"][1] is not None:
                layer.weight_cache.all_rows = scalings[layer, cast][1].reshape(-1, 1)


def _local_part(amaxes: _Amaxes, scaling: Scaling) -> Scaling:
    m, scale = scaling
    if len(m) != amaxes.local.numel():
        m, scale = (t.narrow(0, amaxes.offset, amaxes.local.numel()) for t in scaling)
    return m.reshape(amaxes.local.shape), scale.reshape(amaxes.local.shape)
