"""Scales of all weights from one all-reduce, after the optimizer step.

Each rank has one vector, of integers, with the local statistics of all float8 weights whose scales
depend on other ranks. One MAX all-reduce of this vector, over the union of the axes on which any of
these weights is sharded, gives the global statistics.

The mesh of a weight may lack some of these axes. Ranks with different coordinates on them may then
have different weights. So the vector has one part (slot) per coordinate for such a weight, and a
rank fills in only its own slot.

The statistics of a part of a weight are at their global positions, so that every rank gets the
statistics of the whole weight.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad

from fp8_dist.fsdp.gathers import reshard
from fp8_dist.linear.agreement import check_layers, needs_comparison
from fp8_dist.linear.module import float8_layers
from fp8_dist.linear.parameter import device_of, gathers_float8
from fp8_dist.linear.weight import (
    CONVERT_FIRST,
    Float8Weight,
    float8_modules,
    float8_weights,
    note_made,
)
from fp8_dist.mesh import Layout, all_reduce_max, common_groups, local_tensor, sharded_axes
from fp8_dist.scaling import Dense, Placed, Scheme, Statistics, message_dtype, scheme_named
from fp8_dist.tensor.float8_tensor import Float8Tensor
from fp8_dist.tensor.known import Kept, KnownWeight
from fp8_dist.torch_internals import fsdp_init_shards, set_dtensor_local

# The id of a weight, which layers may share, and the key of one of its schemes.
Key = tuple[int, str]


class _Shard(NamedTuple):
    """A rank's part of a weight, plain and in high precision."""

    local: Tensor
    layout: Layout | None
    gathered: Layout | None  # of what FSDP2 gathers
    is_float8: bool  # what it gathers; the same for all layers that share the parameter
    rounded: torch.dtype | None  # the dtype of what it gathers, to which amaxes are rounded


class WeightStatistics(NamedTuple):
    """Statistics of the weight of a layer, for one scheme."""

    local: Statistics  # of the local shard, on the device that uses them
    layout: Layout | None
    axes: tuple[tuple[int, ...], ...]  # for each level, those of the mesh to reduce over
    places: tuple[Placed | None, ...]  # for each level, among all ranks'; None if not reduced
    # The levels of which each rank gets the scales of the whole weight, because FSDP2 gathers it in
    # float8 and its gather can't carry them, or gathers it in high precision to parts that share
    # scales with other ranks'. In that case the layout of these parts.
    everywhere: tuple[int, ...] = ()
    gathered: Layout | None = None


def local_statistics(weights: Mapping[Float8Weight, Tensor]) -> dict[Key, WeightStatistics]:
    """Measure the shards of weights, by the id of the parameter and the key of the scheme."""
    shards: dict[Key, _Shard] = {}
    alike: dict[tuple[Any, ...], list[Key]] = {}
    for weight, parameter in weights.items():
        stored, layout = local_tensor(parameter), weight.layout(parameter)
        local, is_float8 = KnownWeight.unwrap(stored), gathers_float8(parameter)
        gathered = None if layout is None else weight.gathered_layout(layout)
        device = device_of(local, layout)
        # The scales are those of what arrives. An amax is rounded like the values. (A batched
        # measurement copies the addresses of tensors to the device, which must not change.)
        rounded = None if gathered is None else weight.gathered_as
        for scheme in weight.schemes:
            key = id(parameter), scheme.key
            if rounded is not None and not isinstance(scheme, Dense):
                local, rounded = local.to(rounded), None
            if key not in shards:
                shards[key] = _Shard(local, layout, gathered, is_float8, rounded)
                alike.setdefault((scheme.key, local.dtype, local.device, device), []).append(key)
    found = {}
    for (name, _, _, device), same in alike.items():
        scheme, each = scheme_named(name), [shards[key] for key in same]
        starts = [scheme.start(shard.layout) for shard in each]
        measured = scheme.measure_each([shard.local for shard in each], starts)
        levels = zip(*[_moved(level, device) for level in zip(*measured, strict=True)], strict=True)
        for key, shard, statistics in zip(same, each, levels, strict=True):
            found[key] = _placed(shard, statistics, scheme)
    return {key: found[key] for key in shards}


def _moved(tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Move tensors of one dtype to a device, by one copy."""
    if tensors[0].device == device:
        return tensors
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _placed(shard: _Shard, local: Statistics, scheme: Scheme) -> WeightStatistics:
    layout, axes = shard.layout, scheme.axes(shard.layout)
    if shard.rounded is not None:
        local = tuple([amax.to(shard.rounded).to(amax.dtype) for amax in local])
    if layout is None:
        return WeightStatistics(local, None, axes, (None,) * len(local))
    gathered, everywhere, sharded = shard.gathered, tuple[int, ...](), sharded_axes(layout)
    if shard.is_float8:
        moving = scheme.moving_levels(layout, gathered)
        everywhere = () if moving and scheme.scales_fit_gather(layout, gathered) else moving
    elif gathered is not None and any(scheme.axes(gathered)):
        everywhere = tuple(range(len(local)))
    axes = tuple([sharded if i in everywhere else own for i, own in enumerate(axes)])
    levels = zip(local, scheme.levels, axes, strict=True)
    places = [
        Placed.of(own, level, layout, sharded) if over else None for own, level, over in levels
    ]
    kept = None if shard.is_float8 or not everywhere else gathered
    return WeightStatistics(local, layout, axes, tuple(places), everywhere, kept)


def precompute_float8_dynamic_scale(module: nn.Module) -> None:
    """Compute the scales of all float8 weights of a model after their values have changed.

    Call it on all ranks after ``optimizer.step()``, or let :func:`fp8_dist.attach_update` do
    so. The next forward and backward then need no amax collectives for weights, whether these are
    sharded by FSDP2, by tensor parallelism, or by both. A weight that is not distributed needs no
    other rank, and is left out.

    Compiled code may call it, with a graph break. Graphs that use scales are not recompiled.

    A weight that is stored in float8 (:func:`fp8_dist.freeze_to_float8`) has its scales already.

    Args:
        module: the model, or a part of it.

    Collectives: one all-reduce (MAX) of 4 bytes per scale that depends on several ranks; none if no
    scale does. With one scale per row, these are the scales of row-parallel weights, and of weights
    that FSDP2 shards unevenly. If all of the scales are those of blocks that shards cut, there is 1
    byte per block. There are more bytes if weights live on different axes of the mesh. If the mesh
    was sliced from one that leaves out ranks of the world, there is one all-reduce for each axis.

    A stage of a pipeline has no group over its axes at first. The first call makes the groups of
    all stages, so all ranks of the world must make it (or see ``fp8_dist.fsdp.make_amax_group``).
    For a module that has not run yet, the first call also compares its layers between the ranks of
    their meshes, by an all-reduce of 16 bytes for each axis, which ``comm_audit`` does not count.

    Raises:
        ValueError: ranks differ in the layers of ``module`` or in their configs (the error names
            the first difference); ``module`` has no converted layer whose weight has a DYNAMIC
            scale; a weight is not the parameter that the optimizer updates (FSDP1's flattened
            shards, parametrizations); or FSDP2 is to reshard to a smaller mesh after forward, which
            it can't do with float8 gathers.
        NotImplementedError: weights on several meshes that are not slices of one root mesh.
        torch._dynamo.exc.Unsupported: in compiled code with ``fullgraph=True``.
    """
    precompute_weights(module)


# A graph writes to parameters when it ends. Within a graph that updates weights, this function
# would silently use the old values.
@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="precompute_float8_dynamic_scale looks at weights, which graphs write to when they end; "
    "call it outside of code that is compiled with fullgraph=True"
)
@torch.inference_mode(False)  # autograd can't save inference tensors
@torch.no_grad()
def precompute_weights(module: nn.Module, chosen: dict[str, Float8Weight] | None = None) -> None:
    """Run :func:`precompute_float8_dynamic_scale` for the given weights, by FQN; None: all."""
    if chosen is None:
        check_agreement(module, "precompute_float8_dynamic_scale")
        chosen = dynamic_weights(module, "precompute_float8_dynamic_scale")
    # Unsharded weights still have the values from before the optimizer step.
    reshard(module, "precompute_float8_dynamic_scale")
    for part in module.modules():
        if isinstance(part, FSDPModule):
            fsdp_init_shards(part)
    _check_weights(chosen)
    parameters = {weight: weight.parameter() for weight in chosen.values()}
    _store_scales({weight: p for weight, p in parameters.items() if weight.is_kept(p)})
    note_made(chosen.values())


def check_agreement(module: nn.Module, caller: str) -> None:
    """Compare the layers of a module between ranks if it has not run yet (see check_layers).

    Call it before raising an error for a module without converted layers: other ranks may have
    some.
    """
    if needs_comparison(module):
        modules = float8_modules(module)
        reshard(module, caller)
        check_layers(module, modules, caller)


def dynamic_weights(module: nn.Module, caller: str) -> dict[str, Float8Weight]:
    """Return the float8 weights of a module that have dynamic scales, by FQN."""
    every = float8_weights(module)
    weights = {fqn: weight for fqn, weight in every.items() if weight.is_dynamic}
    if not (weights or any(weight.is_stored for weight in every.values())):
        what = CONVERT_FIRST
        if any(layer.histories for layer in float8_layers(module).values()):
            what = "call sync_float8_amax_and_scale_history for DELAYED ones"
        raise ValueError(
            f"{caller}: the module has no layer with a float8 weight of dynamic scale; {what}"
        )
    return weights


def _check_weights(weights: dict[str, Float8Weight]) -> None:
    other = [fqn for fqn, weight in weights.items() if not weight.is_registered]
    if other:
        raise ValueError(
            "precompute_float8_dynamic_scale: these weights are not the parameters that an "
            f"optimizer updates: {', '.join(other)} (flattened shards, as FSDP1 keeps them, or "
            "parametrized). Use fully_shard (FSDP2), or leave precompute out: the layers scale "
            "what they get"
        )
    unsharded = [
        weight.fqn or fqn  # the full name, also if the caller passed the layer itself
        for fqn, weight in weights.items()
        if isinstance(local_tensor(weight.parameter()), Float8Tensor)
    ]
    if unsharded:
        raise ValueError(
            "precompute_float8_dynamic_scale: these weights are unsharded float8 copies: "
            f"{', '.join(unsharded)}. Call it on the root module, or reshard() the FSDP modules "
            "that hold them first"
        )


def _reduced(weights: Iterable[WeightStatistics]) -> Iterator[Tensor]:
    """All-reduce the statistics that depend on other ranks, and return those of each level."""
    distributed = [(w.layout.mesh, w) for w in weights if w.layout is not None]
    chosen = [(mesh, place) for mesh, w in distributed for place in w.places if place is not None]
    if not chosen:
        return iter(())
    axes: dict[DeviceMesh, set[int]] = {}
    for mesh, w in distributed:
        if any(w.axes):
            axes.setdefault(mesh, set()).update(*w.axes)
    groups, missing = common_groups(axes)
    rank = dist.get_rank()
    sizes: list[int] = []
    parts: list[torch.Tensor] = []
    dtype = message_dtype([place.local for _, place in chosen])
    for mesh, place in chosen:
        # Along the axes of its own mesh a weight is one tensor. Along the missing axes there may be
        # a different one at each coordinate.
        slots, slot = 1, 0
        for axis in missing.get(mesh, ()):
            slots, slot = slots * axis.size, slot * axis.size + axis.coordinate(rank)
        before, after = slot * place.size, (slots - slot - 1) * place.size
        whole = place.flat(dtype)
        parts.append(pad(whole, (before, after)) if slots > 1 else whole)
        sizes += [before, place.size, after]
    return iter(all_reduce_max(torch.cat(parts), groups).split(sizes)[1::3])


def _store_scales(weights: Mapping[Float8Weight, Tensor]) -> None:
    """Store the statistics of weights, given with their parameters.

    These are those of the shard; or of what FSDP2 gathers in high precision, if a forward needs
    other ranks for them; or of the whole weight, if no gather carries its scales.
    """
    local = local_statistics(weights)
    parts = _reduced(local.values())
    wholes: dict[Key, list[Tensor]] = {}
    for key, own in local.items():
        each = zip(own.local, own.places, strict=True)
        wholes[key] = [n if place is None else place.whole(next(parts)) for n, place in each]
    for weight, parameter in weights.items():
        kept: dict[Scheme, Statistics] = {}
        layout, is_whole = weight.layout(parameter), False
        assert layout is not None
        if not (is_float8 := gathers_float8(parameter)):
            layout = weight.gathered_layout(layout) or layout
        schemes = weight.schemes if is_float8 else weight.shared_schemes(layout)
        for scheme in schemes:
            own = local[id(parameter), scheme.key]
            whole = tuple(wholes[id(parameter), scheme.key])
            if own.gathered is not None:
                kept[scheme] = scheme.local_part(whole, own.gathered)
            elif own.everywhere:
                is_whole, kept[scheme] = True, whole
            else:
                places = zip(whole, own.places, strict=True)
                kept[scheme] = tuple([n if place is None else place.part(n) for n, place in places])
        if not isinstance(held := local_tensor(parameter), KnownWeight):
            held = KnownWeight(held)
            set_dtensor_local(parameter, held)  # type: ignore[arg-type]
        what = Kept(tuple(kept), layout, is_whole)
        held.store(what, [*kept.values()], parameter, precomputed=True)
