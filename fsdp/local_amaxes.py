"""Amaxes of the local shards of many weights, and their positions among those of all ranks."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from fp8_dist.cast import exponents_of_each, local_amax
from fp8_dist.cut_blocks import are_cut, granularity_at, scales_fit_into_gather
from fp8_dist.granularity import ROW, TENSOR, Granularity
from fp8_dist.kernels import amax_of_each
from fp8_dist.linear.module import Float8Linear
from fp8_dist.linear.streams import device_of
from fp8_dist.mesh import Layout, global_offset, local_sizes, narrowed


class Amaxes(NamedTuple):
    """Amaxes of the weight of a layer, in one granularity. For blocks, their exponents.

    Attributes:
        mesh: the mesh of the weight; None if it is not distributed.
        local: the amaxes of the local shard, in the shape of its scales.
        shape: the shape of the global weight's scales.
        offset: the offset of the local scales in the global ones, per dim.
        axes: the mesh axes over which amaxes are reduced; empty if the local ones are global.
    """

    mesh: DeviceMesh | None
    local: torch.Tensor
    shape: list[int]
    offset: list[int]
    axes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of scales of the global weight."""
        return math.prod(self.shape)

    def at_global_positions(self) -> torch.Tensor:
        """Return all amaxes of the global weight, flat, with zeros for those that are not local."""
        added: list[int] = []
        for n, start, size in zip(self.local.shape, self.offset, self.shape, strict=True):
            added = [start, size - start - n, *added]  # from the last dim on
        return (pad(self.local, added) if any(added) else self.local).reshape(-1)

    def local_part(self, values: torch.Tensor) -> torch.Tensor:
        """Slice one value for each amax, flat, to the local shard, in the shape of its scales."""
        if values.numel() != self.local.numel():
            values = narrowed(values.view(self.shape), self.offset, self.local.shape)
        return values.reshape(self.local.shape)


def local_amaxes(layers: Iterable[Float8Linear]) -> dict[tuple[int, Granularity], Amaxes]:
    """Return the amaxes by the id of the weight, which layers may share, and the granularity."""
    wanted = {
        (id(layer.weight), cast.granularity): layer
        for layer in layers
        for cast in layer.config.casts("weight")
    }
    shards = {key: layer.float8_weight.shard() for key, layer in wanted.items()}
    alike: dict[tuple[Any, ...], list[tuple[int, Granularity]]] = {}
    for key, layer in wanted.items():
        dtype = layer.config.casts("weight")[0].dtype if key[1].blocks else None
        alike.setdefault(
            (key[1], shards[key].device, device_of(layer.float8_weight), dtype), []
        ).append(key)
    found = {}
    for (granularity, _, device, _), same in alike.items():
        if granularity.blocks is None:
            values = _amaxes_of_each([shards[key] for key in same], granularity, device)
        else:
            values = _exponents_of_each([wanted[key] for key in same], device)
        for key, value in zip(same, values, strict=True):
            found[key] = _with_position(wanted[key], value, granularity)
    return {key: found[key] for key in wanted}


def _amaxes_of_each(
    shards: list[torch.Tensor], granularity: Granularity, device: torch.device
) -> list[torch.Tensor]:
    """Return the local amaxes of each shard, in the shape of its scales, on ``device``."""
    if granularity not in (TENSOR, ROW):
        return [local_amax(shard, granularity).to(device) for shard in shards]
    shapes = [granularity.scale_shape(shard.shape) for shard in shards]
    values = amax_of_each(shards[0], shards[1:], granularity is ROW).to(device)
    parts = values.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _exponents_of_each(layers: list[Float8Linear], device: torch.device) -> list[torch.Tensor]:
    """Return the exponents of each layer's shard, on ``device``; all weights have one cast."""
    (cast,) = layers[0].config.casts("weight")
    weights = [layer.float8_weight for layer in layers]
    shards = [weight.shard() for weight in weights]
    parts = [granularity_at(cast.granularity, weight.layout()) for weight in weights]
    shapes = [of.scale_shape(shard.shape) for of, shard in zip(parts, shards, strict=True)]
    flat = exponents_of_each(shards, cast, parts).to(device)
    values = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(values, shapes, strict=True)]


def _with_position(layer: Float8Linear, local: torch.Tensor, granularity: Granularity) -> Amaxes:
    layout = layer.float8_weight.layout()
    if layout is None:
        return Amaxes(None, local, list(local.shape), [0] * local.ndim, ())
    axes = _axes_that_decide(layer, layout, granularity)
    shape = granularity.scale_shape(layout.shape)
    offset = [0] * len(shape)
    if shape and axes:  # the ranks of a mesh have no values under FakeTensorMode
        offset = granularity.offset(global_offset(layout))
    return Amaxes(layout.mesh, local, shape, offset, axes)


def _axes_that_decide(
    layer: Float8Linear, layout: Layout, granularity: Granularity
) -> tuple[int, ...]:
    """Return the mesh axes of a weight over which its amaxes are reduced."""
    gathered = granularity.scales_move and layer.config.fsdp_float8_all_gather
    if granularity.blocks is not None:
        fit = gathered and scales_fit_into_gather(layout, granularity)
        needed = are_cut(layout, granularity) or (gathered and not fit)
        over = TENSOR.amax_axes(layout.placements, 2) if needed else ()
        return tuple(axis for axis in over if layout.mesh.size(axis) > 1)
    over = granularity.amax_axes(layout.placements, 2)
    if gathered and len(local_sizes(layout, 0)) > 1:
        # Scales of unequal parts don't fit into FSDP2's gather, so all ranks reduce all of them.
        over = TENSOR.amax_axes(layout.placements, 2)
    return tuple(axis for axis in over if layout.mesh.size(axis) > 1)
