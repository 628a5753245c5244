"""Checks of weights, and casts of their shards, before FSDP2 gathers them in float8.

Importing this module makes FSDP2 compare layers between ranks before its first gather.

On a GPU, one launch per weight, on the stream that FSDP2 gathers from, costs more time than the
cast of a shard itself. So the first gather that finds no cast of its shard casts the shards of all
layers without one. The other casts stay in the caches of their layers until their own gathers.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from fp8_dist.cast import placed
from fp8_dist.device import fuses_casts, is_captured, keep_for_current_stream
from fp8_dist.linear.agreement import (
    check_layers,
    is_part_of_converted,
    mark_compared,
    needs_comparison,
)
from fp8_dist.linear.weight import Float8Weight, float8_modules, note_made, weights_of
from fp8_dist.linear.weight_cache import ScaleState
from fp8_dist.scaling import Copy
from fp8_dist.torch_internals import (
    before_fsdp_gathers,
    fsdp_groups,
    fsdp_groups_of_module,
    fsdp_groups_of_same_root,
    fsdp_is_running,
    fsdp_parameters,
    fsdp_reshards_to_smaller_mesh,
    fsdp_roots_of,
    in_backward,
    is_selectively_checkpointed,
)

# FSDP2's parameter group of each layer whose weight it gathers in float8. The layer itself, a child
# of the sharded module, has no reference to its group.
_groups: "WeakKeyDictionary[nn.Module, ReferenceType[Any]]" = WeakKeyDictionary()

LARGEST_BUFFER = 2**30  # bytes of the casts that share memory


def _before_first_gather(group: Any) -> None:
    """Compare the layers of a parameter group between ranks, and note its sharded parameters."""
    _compare_between_ranks(group)
    for parameter in fsdp_parameters([group]):
        for module, name in parameter.users:
            weight = weights_of(module).get(name)
            if weight is not None and not weight.is_exchanged:
                weight.note_sharded(parameter.parameter)


def _compare_between_ranks(group: Any) -> None:
    """Compare the layers of the model that a parameter group belongs to, once.

    This includes layers whose weights FSDP2 gathers in high precision, because their forward
    reduces amaxes.
    """
    if not any(needs_comparison(module) for module in group.modules):
        return
    for module in filter(needs_comparison, fsdp_roots_of(group)):
        modules = float8_modules(module)
        # A rank that has converted only other parts of the model takes part too.
        if modules or is_part_of_converted(module):
            check_layers(module, modules, "FSDP2's first gather")
        else:
            mark_compared(module)


before_fsdp_gathers(
    _before_first_gather,
    "layers are not compared between ranks before FSDP2's first gather, and experts whose weights "
    "FSDP2 gathers in high precision may use the scales of older values",
)


def reshard(module: nn.Module, caller: str) -> None:
    """Reshard all FSDP modules, which puts their sharded parameters back in place."""
    names = {m: n or "the root" for n, m in module.named_modules() if isinstance(m, FSDPModule)}
    groups = {part: fsdp_groups_of_module(part) for part in names}
    for part, name in names.items() if in_backward() else ():
        if any(map(fsdp_is_running, groups[part])):
            raise ValueError(
                f"{caller}: called within a backward of {name} (from a hook?), which still needs "
                "what FSDP2 has gathered; call it after optimizer.step(), or attach it "
                "(attach_update)"
            )
    for part, name in names.items():
        for group in groups[part]:
            if any(parameter.has_hooks for parameter in fsdp_parameters([group])):
                _check_reshards(group, name)
        part.reshard()


def check_layer(layer: nn.Module, name: str) -> None:
    """Check a layer whose weight FSDP2 is about to gather."""
    if layer not in _groups or _groups[layer]() is None:  # first gather: look up all layers at once
        for group in fsdp_groups():
            for parameter in fsdp_parameters([group]):
                if parameter.has_hooks:
                    _groups.update((module, ref(group)) for module, _ in parameter.users)
    if (group := group_of(layer)) is not None:
        _check_reshards(group, name)


def group_of(layer: nn.Module) -> Any:
    """Return FSDP2's parameter group of a layer; None before :func:`check_layer` has found it."""
    group = _groups.get(layer)
    return None if group is None else group()


def _check_reshards(group: Any, name: str) -> None:
    # FSDP2 would make a parameter of its all-gather output, resharded to the smaller mesh. Here the
    # output is float8 bytes, so it would fail with an error about dtypes that require gradients.
    if fsdp_reshards_to_smaller_mesh(group):
        raise ValueError(
            f"{name}: fully_shard(..., reshard_after_forward=<int>) can't reshard weights "
            "that it gathers in float8 to a smaller mesh; use True or False there, or leave "
            "enable_fsdp_float8_all_gather off"
        )


def cast_together(weight: Float8Weight, evaluates: bool) -> None:
    """Cast the shard of a weight that FSDP2 is about to gather, unless a cast of it is cached.

    The shards of other layers that FSDP2 gathers under the same root module are cast too, if their
    precomputed scales are fresh and no cast is cached. All casts take one or a few launches, on the
    current stream. On devices where this is not faster than single casts, the function does
    nothing, and the gather casts its shard alone.

    Args:
        weight: the weight that is gathered.
        evaluates: the gather belongs to an evaluation, which does not use earlier casts.

    Collectives: none.
    """
    # Selective checkpointing counts operators, so a gather must run those of one weight only.
    group = group_of(weight.module)
    if group is None or not _lacks_cast(weight) or is_selectively_checkpointed():
        return
    alike: dict[tuple[Any, ...], list[Float8Weight]] = {}
    for other in _gathered_with(group):
        cache = other.cache
        if evaluates and not (other is weight or other.module.training or cache.is_cast_ahead):
            cache.begin_evaluation()
            cache.is_cast_ahead = True
        if _lacks_cast(other):
            (scheme,), shard = other.schemes, other.shard()
            alike.setdefault((scheme, shard.dtype, shard.device), []).append(other)
    for same in alike.values():
        for part in _parts(same):
            _cast_alike(part)


def _gathered_with(group: Any) -> Iterator[Float8Weight]:
    """Yield the weights that FSDP2 gathers in float8, in all parameter groups under one root.

    Groups of another root may not be initialized, and initialization replaces local tensors.
    """
    for parameter in fsdp_parameters(fsdp_groups_of_same_root(group)):
        module, name = parameter.users[0]
        if parameter.has_hooks and name in weights_of(module):
            yield weights_of(module)[name]


def _lacks_cast(weight: Float8Weight) -> bool:
    """Whether a cast of the shard is missing, could be cached, and is cheaper in a batch."""
    cache = weight.cache
    if (
        cache.float8 is not None
        or cache.state is not ScaleState.PRECOMPUTED
        or not weight.config.cache_float8_shards
    ):
        return False
    shard = weight.shard()
    return fuses_casts(shard) and not is_captured(shard) and cache.is_fresh(weight.parameter())


def _parts(weights: list[Float8Weight]) -> Iterator[list[Float8Weight]]:
    """Yield lists of weights whose casts share a buffer.

    The size of a buffer is limited, because it is freed only with the last of its casts.
    """
    part: list[Float8Weight] = []
    size = 0
    for weight in weights:
        bytes_ = weight.shard().numel()
        if part and size + bytes_ > LARGEST_BUFFER:
            yield part
            part, size = [], 0
        part.append(weight)
        size += bytes_
    yield part


@torch.inference_mode(False)
@torch.no_grad()
def _cast_alike(weights: Sequence[Float8Weight]) -> None:
    """Cast the shards of weights with the same scheme, and with the same shard dtype and device."""
    (scheme,) = weights[0].schemes
    shards = [weight.shard().detach() for weight in weights]
    statistics = [(weight.cache.known or {})[scheme] for weight in weights]
    for weight in weights:
        weight.wait_until_made()
    keep_for_current_stream([number for own in statistics for number in own])
    layouts = [weight.layout() for weight in weights]
    made = scheme.cast_each(shards, statistics, [scheme.start(layout) for layout in layouts])
    for weight, layout, (scales, qdata) in zip(weights, layouts, made, strict=True):
        weight.cache.float8 = {Copy(scheme): placed(qdata, scales, scheme, layout)}
    note_made(weights)
