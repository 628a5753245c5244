"""Scales of all weights from one all-reduce, after the optimizer step.

Each process has one fp32 vector of the local amaxes of all float8 weights that need amaxes of other
ranks. One MAX all-reduce over the union of the axes on which any of them is sharded gives the
global amaxes. A weight whose own mesh lacks some of those axes may have other values at other
coordinates on them. It gets a part (slot) of the vector per coordinate there, and fills in only its
own. Amaxes of rows and columns are at their global positions, so that all ranks get all scales.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad

from fp8_dist.config import CastSpec
from fp8_dist.fsdp.checks import check_outside_of_backward, check_sharded_module
from fp8_dist.fsdp.local_amaxes import Amaxes, local_amaxes
from fp8_dist.granularity import Granularity
from fp8_dist.kernels import Scaling, powers_of_2, scaling_from_amax
from fp8_dist.linear.agreement import check_layers, needs_comparison
from fp8_dist.linear.module import Float8Linear, float8_layers
from fp8_dist.linear.streams import note_made
from fp8_dist.linear.weight_cache import PendingScales, WeightCache
from fp8_dist.mesh import AmaxReduction, common_groups, local_tensor
from fp8_dist.tensor.float8_tensor import Float8Tensor
from fp8_dist.torch_internals import fsdp_init_shards


class _Reduction(NamedTuple):
    """All-reduce that is under way, and the sizes of the parts of its vector."""

    amaxes: AmaxReduction
    sizes: list[int]  # three for each weight: slots before this rank's, its own, slots after


def precompute_float8_dynamic_scale(module: nn.Module) -> None:
    """Compute the scales of all float8 weights of a model after their values have changed.

    Call it on all ranks after ``optimizer.step()``, or let :func:`fp8_dist.attach_precompute` do
    so. The next forward and backward then need no amax collectives for weights, whether these are
    sharded by FSDP2, by tensor parallelism, by both, or not at all. ``module`` may be a part of the
    model. Compiled code may call it, with a graph break. Graphs that use scales are not recompiled.

    A frozen weight that FSDP2 does not gather in float8 is left out. It is scaled in each forward,
    since it may change unnoticed, as in a merge of adapters.

    Collectives: one all-reduce (MAX) of 4 bytes per scale that covers values of several ranks, none
    if no scale does. If all of them are of blocks that shards cut, it has 1 byte per block. It has
    more bytes if weights live on different axes of the mesh. With one scale per row, these are the
    rows of row-parallel weights, and of weights that FSDP2 shards unevenly.
    A stage of a pipeline has no group over its axes at first. The first call makes the groups of
    all stages, so all ranks of the world must make it (or see ``fp8_dist.fsdp.make_amax_group``).
    If the mesh was sliced from one that leaves out ranks of the world, each axis has an all-reduce.
    On CPUs it runs in the background, and the first use of a scale waits for it. For a module that
    has not run yet, the first call also compares its layers between the ranks of their meshes: an
    all-reduce of 16 bytes for each axis, which ``comm_audit`` does not count.

    Raises:
        ValueError: ranks differ in the layers of ``module`` or in their configs (the error names
            the first difference), or it has no converted layer whose weight has a DYNAMIC scale, or
            a weight is not the 2-D parameter that the optimizer updates (FSDP1's flattened shards,
            parametrizations), or FSDP2 reshards to a smaller mesh after forward, which it can't do
            with float8 gathers.
        NotImplementedError: weights on several meshes that are not slices of one root mesh.
        torch._dynamo.exc.Unsupported: in compiled code with ``fullgraph=True``.
    """
    precompute_layers(module)


# A graph writes to parameters when it ends. Within a graph that updates weights, amaxes would
# silently be those of the old values. Also, the caches of weights are Python objects.
@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="precompute_float8_dynamic_scale looks at weights, which graphs write to when they end; "
    "call it outside of code that is compiled with fullgraph=True"
)
@torch.inference_mode(False)  # autograd can't save inference tensors
@torch.no_grad()
def precompute_layers(module: nn.Module, layers: dict[str, Float8Linear] | None = None) -> None:
    """Run :func:`precompute_float8_dynamic_scale` for some ``layers``, by name; None: all."""
    if layers is None:
        check_agreement(module, "precompute_float8_dynamic_scale")
        layers = layers_of_dynamic_weights(module, "precompute_float8_dynamic_scale")
    # Unsharded weights have the values before the optimizer step.
    reshard(module, "precompute_float8_dynamic_scale")
    for part in module.modules():
        if isinstance(part, FSDPModule):
            fsdp_init_shards(part)
    _check_weights(layers)
    # The id of the parameter that each layer has now: FSDP2 will replace it by another one.
    weights = {
        layer: id(layer.weight)
        for layer in layers.values()
        if not layer.float8_weight.may_change_unnoticed(layer.weight)
    }
    amaxes = local_amaxes(weights)
    reduction = _start(list(amaxes.values()))

    def find() -> list[tuple[WeightCache, dict[CastSpec, Scaling], torch.Tensor | None]]:
        reduced = _reduced(list(amaxes.values()), reduction)
        return _scalings(weights, dict(zip(amaxes, reduced, strict=True)))

    pending = PendingScales(find)
    for layer in weights:
        layer.float8_weight.cache.store_pending(layer.weight, pending)
    if reduction is None or not reduction.amaxes.blocks_host:
        # On a GPU this only queues the wait. Later it would be queued on the first stream that
        # needs a scale, such as FSDP2's for gathers, and other streams would not wait for that one.
        pending.wait()
        note_made(layer.float8_weight for layer in weights)


def check_agreement(module: nn.Module, caller: str) -> None:
    """Compare the layers of a module that is updated before it has run (see check_layers).

    Call it before ranks that have converted nothing raise an error.
    """
    if needs_comparison(module):
        layers = float8_layers(module)
        reshard(module, caller)
        check_layers(module, layers, caller)


def reshard(module: nn.Module, caller: str) -> None:
    """Reshard all FSDP modules, which puts their sharded parameters back in place."""
    check_outside_of_backward(module, caller)
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule):
            check_sharded_module(part, name or "the root")
            part.reshard()


def layers_of_dynamic_weights(module: nn.Module, caller: str) -> dict[str, Float8Linear]:
    """Return the layers of a module whose float8 weight has a dynamic scale, by name."""
    every = float8_layers(module)
    layers = {
        name or layer.fqn: layer
        for name, layer in every.items()
        if any(not cast.delayed for cast in layer.config.casts("weight"))
    }
    if not layers:
        what = "convert_to_float8_training first"
        if any(layer.histories for layer in every.values()):
            what = "sync_float8_amax_and_scale_history for DELAYED ones"
        raise ValueError(
            f"{caller}: the module has no Float8Linear with a float8 weight of dynamic scale; call "
            f"{what}"
        )
    return layers


def _check_weights(layers: dict[str, Float8Linear]) -> None:
    other = [n for n, m in layers.items() if "weight" not in m._parameters or m.weight.ndim != 2]
    if other:
        raise ValueError(
            "precompute_float8_dynamic_scale: these weights are not the parameters that an "
            f"optimizer updates: {', '.join(other)} (flattened shards, as FSDP1 keeps them, or "
            "parametrized). Use fully_shard (FSDP2), or leave precompute out: the layers scale "
            "what they get"
        )
    unsharded = [n for n, m in layers.items() if isinstance(local_tensor(m.weight), Float8Tensor)]
    if unsharded:
        raise ValueError(
            "precompute_float8_dynamic_scale: these weights are unsharded float8 copies: "
            f"{', '.join(unsharded)}. Call it on the root module, or reshard() the FSDP modules "
            "that hold them first"
        )


def _start(amaxes: Sequence[Amaxes]) -> _Reduction | None:
    """Start the one all-reduce of the amaxes that need it."""
    chosen = [a for a in amaxes if a.axes]
    if not chosen:
        return None
    pairs = [(a.mesh, a.axes) for a in chosen if a.mesh is not None]
    groups, missing = common_groups(_axes_by_mesh(pairs))
    rank = dist.get_rank()
    sizes: list[int] = []
    parts: list[torch.Tensor] = []
    of_bytes = all(a.local.dtype is torch.uint8 for a in chosen)
    for a in chosen:
        # Along the axes of its own mesh a weight is one tensor; along the others there may be
        # as many as there are coordinates.
        slots, slot = 1, 0
        assert a.mesh is not None
        for axis in missing.get(a.mesh, ()):
            slots, slot = slots * axis.size, slot * axis.size + axis.coordinate(rank)
        before, after = slot * a.size, (slots - slot - 1) * a.size
        whole = a.at_global_positions()
        whole = whole if of_bytes else _as_amaxes(whole)
        parts.append(pad(whole, (before, after)) if slots > 1 else whole)
        sizes += [before, a.size, after]
    return _Reduction(AmaxReduction(torch.cat(parts), groups), sizes)


def _axes_by_mesh(
    pairs: Iterable[tuple[DeviceMesh, tuple[int, ...]]],
) -> dict[DeviceMesh, set[int]]:
    # By identity first: comparing meshes of thousands of ranks takes longer than all the rest.
    meshes: dict[int, tuple[DeviceMesh, set[int]]] = {}
    for mesh, some in pairs:
        meshes.setdefault(id(mesh), (mesh, set()))[1].update(some)
    axes: dict[DeviceMesh, set[int]] = {}
    for mesh, own in meshes.values():
        axes.setdefault(mesh, set()).update(own)
    return axes


def _reduced(
    amaxes: Sequence[Amaxes], reduction: _Reduction | None
) -> list[tuple[Amaxes, torch.Tensor | None]]:
    """Pair each with all amaxes of the global weight ``[size]``, or None if local ones suffice."""
    if reduction is None:
        return [(a, None) for a in amaxes]
    parts = iter(reduction.amaxes.wait().split(reduction.sizes)[1::3])
    found = [(a, next(parts) if a.axes else None) for a in amaxes]
    return [
        (a, part if part is None or part.dtype is a.local.dtype else _as_exponents(part))
        for a, part in found
    ]


def _as_amaxes(values: torch.Tensor) -> torch.Tensor:
    """Convert exponents to powers of two, so that they can be reduced with fp32 amaxes."""
    return powers_of_2(values) if values.dtype is torch.uint8 else values


def _as_exponents(amaxes: torch.Tensor) -> torch.Tensor:
    return (amaxes.view(torch.int32) >> 23).to(torch.uint8)


def _scalings(
    weights: dict[Float8Linear, int],
    reduced: dict[tuple[int, Granularity], tuple[Amaxes, torch.Tensor | None]],
) -> list[tuple[WeightCache, dict[CastSpec, Scaling], torch.Tensor | None]]:
    """Compute each layer's scaling by cast, and the scales of the global weight where needed."""
    # Grouped by the parameters of the formula, so that all scales of a kind are computed at once.
    wanted: dict[tuple[Any, ...], list[tuple[Float8Linear, CastSpec]]] = {}
    scalings: dict[tuple[Float8Linear, CastSpec], Scaling] = {}
    for layer in weights:
        for cast in layer.config.casts("weight"):
            if cast.granularity.blocks is not None:
                amaxes, whole = reduced[weights[layer], cast.granularity]
                exponents = amaxes.local.reshape(-1) if whole is None else whole
                scalings[layer, cast] = exponents, exponents
                continue
            device = reduced[weights[layer], cast.granularity][0].local.device
            kind = (cast.dtype, layer.config.round_scales_to_power_of_2, device)
            wanted.setdefault(kind, []).append((layer, cast))
    for (dtype, power_of_2, _), same in wanted.items():
        found = [reduced[weights[layer], cast.granularity] for layer, cast in same]
        values = [a.local.reshape(-1) if whole is None else whole for a, whole in found]
        sizes = [len(value) for value in values]
        multipliers, scales = scaling_from_amax(torch.cat(values), dtype, power_of_2)
        each = zip(same, multipliers.split(sizes), scales.split(sizes), strict=True)
        scalings |= {key: (m, scale) for key, m, scale in each}
    results = []
    for layer, weight in weights.items():
        local, all_scales = dict[CastSpec, Scaling](), None
        for cast in layer.config.casts("weight"):
            amaxes, whole = reduced[weight, cast.granularity]
            m, scale = scalings[layer, cast]
            local[cast] = (amaxes.local_part(m), amaxes.local_part(scale))
            if cast.granularity.scales_move and whole is not None:
                all_scales = scale.view(amaxes.shape)
        results.append((layer.float8_weight.cache, local, all_scales))
    return results
