"""Scales of all weights from one all-reduce, after the optimizer step.

Each rank has one vector of integers, with the local statistics of all float8 weights whose scales
depend on other ranks. One MAX all-reduce of this vector, over the union of the axes on which any of
these weights is sharded, gives the global statistics.

The mesh of a weight may lack some of these axes. Ranks with different coordinates on them may then
have different weights. So the vector has one slot per coordinate for such a weight, and a rank
fills in only its own slot.

In the vector, the statistics of a shard are at their global positions, so that every rank gets the
statistics of the whole weight.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fp8_dist.device import current_capture
from fp8_dist.fsdp.gathers import reshard
from fp8_dist.fsdp.weight import Shard, keep_casts, shards_of
from fp8_dist.fsdp_internals import fsdp_init_shards
from fp8_dist.linear import float8_layers
from fp8_dist.mesh import Layout, common_groups, local_tensor
from fp8_dist.scaling import Dense, Scheme, Statistics
from fp8_dist.scaling.reduction import Placed, all_reduced, packed
from fp8_dist.tensor.float8_tensor import Float8Tensor
from fp8_dist.text import warn_once
from fp8_dist.torch_internals import disabled_in_graphs, normal_tensors, set_dtensor_local
from fp8_dist.weight import agreement
from fp8_dist.weight.float8_weight import Float8Weight
from fp8_dist.weight.known import PRECOMPUTED, Kept, KnownWeight
from fp8_dist.weight.weights import (
    CONVERT_FIRST,
    check_captured,
    float8_modules,
    float8_weights,
    mark_scales_ready,
)

_CALLER = "precompute_float8_dynamic_scale"
_UPDATE = "the update of scales (attach_update, update_float8_scales, or precompute)"

# The id of a weight, which layers may share, and one of its schemes.
Key = tuple[int, Scheme]


class _Measured(NamedTuple):
    """Statistics of the shard of a weight, for one scheme, and how ranks reduce them."""

    layout: Layout
    axes: tuple[tuple[int, ...], ...]  # for each level, the axes of the mesh to reduce over
    places: list[Placed]  # for each level, on the device that uses them


def _measure(weights: Mapping[Float8Weight, Kept]) -> dict[Key, _Measured]:
    """Measure the shards of weights; return the statistics by parameter and scheme."""
    groups: dict[tuple[Any, ...], dict[Key, tuple[Float8Weight, Layout, Tensor]]] = {}
    for weight, kept in weights.items():
        local, device, layout = weight.shard(), weight.device, weight.layout()
        assert layout is not None
        for scheme in kept.schemes:
            # The scales are those of the gathered values. For Dense, rounding the amaxes is enough
            # (_placed). Copies are measured one by one, because batched measurements keep a table
            # of the tensors' addresses.
            alone = None
            if weight.gathered_as is not None and not isinstance(scheme, Dense):
                local, alone = local.to(weight.gathered_as), id(weight.parameter())
            kind = scheme, alone, local.dtype, local.device, device
            groups.setdefault(kind, {})[id(weight.parameter()), scheme] = weight, layout, local
    measured = {}
    for (scheme, *_, device), group in groups.items():
        starts = [scheme.start(layout) for _, layout, _ in group.values()]
        amaxes = scheme.measure_each([local for *_, local in group.values()], starts)
        levels = zip(*[_moved(level, device) for level in zip(*amaxes, strict=True)], strict=True)
        for (key, (weight, layout, _)), statistics in zip(group.items(), levels, strict=True):
            measured[key] = _placed(weight, layout, weights[weight], scheme, statistics)
    return measured


def _moved(tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Move tensors of one dtype to a device, by one copy."""
    if tensors[0].device == device:
        return tensors
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _placed(
    weight: Float8Weight, layout: Layout, kept: Kept, scheme: Scheme, local: Statistics
) -> _Measured:
    if (dtype := weight.gathered_as) is not None:
        # A CPU rounds NaNs to bf16 NaNs with a sign, and ranks reduce the bits as signed integers.
        local = tuple([level.to(dtype).to(level.dtype).abs() for level in local])
    sharded = layout.sharded_axes()
    # If the weight keeps statistics of more than its shard, all ranks contribute to them.
    is_shard = kept.layout == layout and not kept.whole
    axes = scheme.axes(layout) if is_shard else (sharded,) * len(local)
    places = [
        Placed.of(statistics, level, layout, sharded if over else ())
        for statistics, level, over in zip(local, scheme.levels, axes, strict=True)
    ]
    return _Measured(layout, axes, places)


def precompute_float8_dynamic_scale(module: nn.Module) -> None:
    """Compute the scales of all float8 weights of a model after their values have changed.

    Call it on all ranks after ``optimizer.step()``, or let :func:`fp8_dist.attach_update` do
    so. The next forward and backward then need no amax collectives for weights, whether these are
    sharded by FSDP2, by tensor parallelism, or by both. A weight that is not distributed is left
    out.

    Compiled code may call it, with a graph break. Graphs that use scales are not recompiled.

    A weight that is stored in float8 (:func:`fp8_dist.freeze_to_float8`) has its scales already.

    Args:
        module: the model, or a part of it.

    Collectives: one all-reduce (MAX) of 4 bytes per scale that depends on several ranks; none if no
    scale does. With one scale per row, only row-parallel weights, and weights that FSDP2 shards
    unevenly, have such scales. If all such scales are those of blocks that shards cut, the message
    has 1 byte per block. It is larger if weights live on different axes of the mesh. If the mesh
    was sliced from one that leaves out ranks of the world, there is one all-reduce for each axis.

    A stage of a pipeline has no group over its axes at first. The first call makes the groups of
    all stages, so all ranks of the world must make it (or see ``fp8_dist.fsdp.make_amax_group``).
    For a module that has not run yet, the first call also compares its layers between the ranks of
    their meshes, by an all-reduce of 16 bytes for each axis, which ``comm_audit`` does not count.

    Raises:
        ValueError: ranks differ in the layers of ``module`` or in their configs (the error names
            the first difference); ``module`` has no converted layer whose weight has a DYNAMIC
            scale; no weight is the parameter that the optimizer updates (FSDP1's flattened shards,
            parametrizations; if some are, the others are left out with a warning); or FSDP2 is to
            reshard to a smaller mesh after forward, which it can't do with float8 gathers.
        NotImplementedError: weights on several meshes that are not slices of one root mesh; or a
            CUDA graph is being captured, and can't train a weight.
        torch._dynamo.exc.Unsupported: in compiled code with ``fullgraph=True``.
    """
    precompute_weights(module)


# A graph writes to parameters when it ends. Within a graph that updates weights, this function
# would silently use the old values.
@disabled_in_graphs(
    "precompute_float8_dynamic_scale looks at weights, which graphs write to when they end"
)
@normal_tensors()
def precompute_weights(module: nn.Module, chosen: dict[str, Float8Weight] | None = None) -> None:
    """Run :func:`precompute_float8_dynamic_scale` for the given weights, by FQN; None: all.

    The given ones are parameters of their layers, with dynamic scales.
    """
    if chosen is None:
        check_agreement(module, _CALLER)
        chosen = _registered(_dynamic_weights(module))
    # Unsharded weights still have the values from before the optimizer step.
    fsdp_init_shards(reshard(module, _CALLER))
    _check_sharded(chosen)
    shards = shards_of(chosen.values())
    _store_scales(chosen.values(), shards)
    keep_casts(shards)
    mark_scales_ready(chosen.values())


def check_agreement(module: nn.Module, caller: str) -> None:
    """Compare the layers of a module between ranks if it has not run yet.

    Call it before raising an error for a module without converted layers: other ranks may have
    some. In the capture of a CUDA graph, also check that a graph can train the weights.
    """
    if current_capture():
        check_captured(float8_weights(module), caller)
    if agreement.needs_comparison(module):
        reshard(module, caller)
        agreement.check_layers(module, float8_modules(module), caller)


def _dynamic_weights(module: nn.Module) -> dict[str, Float8Weight]:
    """Return the float8 weights of a module that have dynamic scales, by FQN."""
    weights = float8_weights(module)
    dynamic = {fqn: weight for fqn, weight in weights.items() if weight.is_dynamic}
    if not (dynamic or any(weight.is_stored for weight in weights.values())):
        remedy = CONVERT_FIRST
        if any(layer.histories for layer in float8_layers(module).values()):
            remedy = "call update_float8_scales(model) instead, which serves all recipes"
        raise ValueError(
            f"{_CALLER}: the module has no layer with a float8 weight of dynamic scale; {remedy}"
        )
    return dynamic


def _computed(weights: Mapping[str, Float8Weight]) -> list[str]:
    """The FQNs of weights that are no parameters of their layers."""
    return [fqn for fqn, weight in weights.items() if not weight.is_registered]


def warn_of_computed(weights: Mapping[str, Float8Weight]) -> None:
    """Warn once that an update leaves out weights that are no parameters of their layers."""
    if hidden := _computed(weights):
        warn_once(
            f"computed weights {hidden}",
            "these weights are computed from other parameters (a parametrization, weight_norm): "
            f"{', '.join(hidden)}. An update of scales leaves them out, and each forward casts "
            "them",
        )


def _registered(weights: dict[str, Float8Weight]) -> dict[str, Float8Weight]:
    """The weights that are parameters of their layers; raise ValueError if there are none."""
    hidden = _computed(weights)
    if hidden and len(hidden) == len(weights):
        raise ValueError(
            f"{_CALLER}: these weights are not the parameters that an optimizer updates: "
            f"{', '.join(hidden)} (flattened shards, as FSDP1 keeps them, or parametrized). Use "
            "fully_shard (FSDP2), or leave precompute out: the layers compute the scales"
        )
    warn_of_computed(weights)
    return {fqn: weight for fqn, weight in weights.items() if fqn not in hidden}


def _check_sharded(weights: dict[str, Float8Weight]) -> None:
    """Raise ValueError if FSDP2 has gathered weights in float8, and not resharded them."""
    if unsharded := [
        weight.fqn or fqn  # the full name, also if the caller passed the layer itself
        for fqn, weight in weights.items()
        if isinstance(local_tensor(weight.parameter()), Float8Tensor)
    ]:
        raise ValueError(
            f"{_CALLER}: these weights are unsharded float8 copies: {', '.join(unsharded)}. Call "
            "it on the root module, or reshard() the FSDP modules that hold them first"
        )


def _reduced(measured: Iterable[_Measured]) -> Iterator[Tensor]:
    """All-reduce the statistics that depend on other ranks, and return them level by level."""
    placed: list[tuple[DeviceMesh, Placed]] = []
    axes: dict[DeviceMesh, set[int]] = {}
    for layout, level_axes, places in measured:
        if any(level_axes):
            placed += [(layout.mesh, place) for place in compress(places, level_axes)]
            axes.setdefault(layout.mesh, set()).update(*level_axes)
    if not placed:
        return iter(())
    groups, missing = common_groups(axes)
    taken: list[int] = []
    sent: list[Placed] = []
    for mesh, (local, shape, pieces) in placed:
        # Along the axes of its own mesh a weight is one tensor. Along the missing axes there may be
        # a different one at each coordinate.
        slots, slot = 1, 0
        for axis in missing.get(mesh, ()):
            slots, slot = slots * axis.size, slot * axis.size + axis.coordinate(dist.get_rank())
        taken.append(slot)
        sent.append(Placed(local[None], [slots, *shape], [((slot, slot + 1),), *pieces]))
    with agreement.expecting_all_ranks(_UPDATE):
        reduced = all_reduced(sent, groups)
    return (whole[slot] for whole, slot in zip(reduced, taken, strict=True))


class _Group(NamedTuple):
    """Shards of one kind, which are measured together and reduced as if they were one weight.

    The statistics of each are all its own, or one statistic that all ranks share.
    """

    kept: Kept  # what the first one keeps
    axes: tuple[int, ...]  # the axes of the mesh to reduce over
    members: dict[int, Shard]  # by the id of the parameter, which layers may share

    def measured(self) -> _Measured:
        (scheme,) = self.kept.schemes
        flat = scheme.measure_flat([shard.local.plain for shard in self.members.values()])
        return _Measured(self.kept.layout, (self.axes,), [Placed(flat, [len(flat)], [])])

    def store(self, flat: Tensor) -> None:
        """Store the reduced statistics."""
        parts = packed([(flat,)]).split([shard.plan.scale_count for shard in self.members.values()])
        for part, (_, parameter, local, plan) in zip(parts, self.members.values(), strict=True):
            local.store(plan.kept, part, parameter, PRECOMPUTED)
            local.follow_replays()


def _grouped(shards: Iterable[Shard]) -> tuple[list[_Group], set[Float8Weight]]:
    """The shards that can be measured with others, by kind; and their weights."""
    groups: dict[tuple[Any, ...], _Group] = {}
    weights = set[Float8Weight]()
    for shard in shards:
        plan, plain = shard.plan, shard.local.plain
        axes, mesh = plan.reduced_over, plan.kept.layout.mesh
        if axes is not None and plain.device.type == mesh.device_type:
            kind = plan.kept.schemes, mesh, axes, plain.dtype, plain.device
            group = groups.setdefault(kind, _Group(plan.kept, axes, {}))
            group.members[id(shard.parameter)] = shard
            weights.add(shard.weight)
    return [*groups.values()], weights


def _store_scales(weights: Iterable[Float8Weight], shards: Sequence[Shard]) -> None:
    """Measure weights, and store the statistics that each keeps.

    ``shards``: those of the weights that FSDP2 gathers in float8.
    """
    groups, grouped = _grouped(shards)
    alone: dict[Float8Weight, Kept] = {}
    for weight in weights:
        if weight not in grouped and (kept := weight.kept()) is not None:
            alone[weight] = kept
    of_groups = [group.measured() for group in groups]
    measured = _measure(alone)
    reduced = _reduced([*of_groups, *measured.values()])
    for group, (_, _, (place,)) in zip(groups, of_groups, strict=True):
        group.store(next(reduced) if group.axes else place.local)
    whole: dict[Key, Statistics] = {}
    for key, (_, axes, places) in measured.items():
        levels = zip(places, axes, strict=True)
        whole[key] = tuple([next(reduced) if over else p.local for p, over in levels])
    for weight, kept in alone.items():
        parameter, statistics = weight.parameter(), list[Statistics]()
        for scheme in kept.schemes:
            key = id(parameter), scheme
            layout, _, places = measured[key]
            if kept.whole:
                statistics.append(whole[key])
            elif kept.layout != layout:
                statistics.append(scheme.local_part(whole[key], kept.layout))
            else:
                statistics.append(tuple(map(Placed.part, places, whole[key])))
        if not isinstance(shard := local_tensor(parameter), KnownWeight):
            shard = KnownWeight(shard)
            set_dtensor_local(parameter, shard)  # type: ignore[arg-type]
        shard.store(kept, packed(statistics), parameter, PRECOMPUTED)
        shard.follow_replays()
