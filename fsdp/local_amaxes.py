"""Statistics of the local shards of many weights, and their positions among those of all ranks."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fp8_dist.linear.weight import Float8Weight
from fp8_dist.mesh import Layout, local_tensor
from fp8_dist.scaling import Placed, Scheme, Statistics, sharded_axes

# The id of a weight, which layers may share, and one of its schemes.
Key = tuple[int, Scheme]


class WeightStatistics(NamedTuple):
    """Statistics of the weight of a layer, for one scheme.

    Attributes:
        local: the statistics of the local shard, on the device that uses them.
        layout: the layout of the weight; None if it is not distributed.
        axes: for each level, the mesh axes to reduce over; empty if local statistics are global.
        places: for each level, its statistics with their position among those of all ranks; None
            if they are not reduced.
        everywhere: the levels of which each rank needs the scales of the whole weight, because
            FSDP2 gathers the weight in float8, and its gather can't carry them.
    """

    local: Statistics
    layout: Layout | None
    axes: tuple[tuple[int, ...], ...]
    places: tuple[Placed | None, ...]
    everywhere: tuple[int, ...] = ()

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the weight."""
        return None if self.layout is None else self.layout.mesh


def local_statistics(weights: Iterable[Float8Weight]) -> dict[Key, WeightStatistics]:
    """Measure the shards of weights, by the id of the parameter and the scheme."""
    wanted = {
        (id(weight.parameter()), scheme): weight for weight in weights for scheme in weight.schemes
    }
    shards = {key: weight.shard() for key, weight in wanted.items()}
    alike: dict[tuple[Any, ...], list[Key]] = {}
    for key, weight in wanted.items():
        kind = (key[1], shards[key].dtype, shards[key].device, weight.device)
        alike.setdefault(kind, []).append(key)
    found = {}
    for (scheme, _, _, device), same in alike.items():
        starts = [scheme.start(wanted[key].layout()) for key in same]
        each = scheme.measure_each([shards[key] for key in same], starts)
        levels = zip(*[_moved(level, device) for level in zip(*each, strict=True)], strict=True)
        for key, statistics in zip(same, levels, strict=True):
            found[key] = _placed(wanted[key], statistics, scheme)
    return {key: found[key] for key in wanted}


def _moved(tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Move tensors of one dtype to a device, by one copy."""
    if tensors[0].device == device:
        return tensors
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _placed(weight: Float8Weight, local: Statistics, scheme: Scheme) -> WeightStatistics:
    layout = weight.layout()
    axes = scheme.axes(layout)
    if layout is None:
        return WeightStatistics(local, None, axes, (None,) * len(local))
    # FSDP2 goes by the type of the parameter, which is the same for all layers that share it.
    is_gathered = weight.shard() is not local_tensor(weight.parameter())
    moving = scheme.moving_levels(layout) if is_gathered else ()
    everywhere = () if moving and scheme.rides_in_gather(layout) else moving
    sharded = sharded_axes(layout)
    axes = tuple([sharded if i in everywhere else own for i, own in enumerate(axes)])
    levels = zip(local, scheme.levels, axes, strict=True)
    places = [
        Placed.of(own, level, layout, sharded) if over else None for own, level, over in levels
    ]
    return WeightStatistics(local, layout, axes, tuple(places), everywhere)
