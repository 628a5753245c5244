"""Batched casts of the shards that FSDP2 gathers in float8.

On a GPU, one launch per weight, on the stream that FSDP2 gathers from, costs more time than the
cast of a shard itself. So the first gather that finds no cast of its shard casts the shards of all
layers without one. The other casts stay in the caches of their layers until their own gathers.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fp8_dist.cast import placed
from fp8_dist.device import fuses_casts, is_captured, keep_for_current_stream
from fp8_dist.fsdp.checks import group_of
from fp8_dist.linear.weight import Float8Weight, note_made, weights_of
from fp8_dist.linear.weight_cache import ScaleState
from fp8_dist.scaling import Copy
from fp8_dist.torch_internals import (
    fsdp_groups_of_same_root,
    fsdp_parameters,
    is_selectively_checkpointed,
)

LARGEST_BUFFER = 2**30  # bytes


def cast_together(weight: Float8Weight, evaluates: bool) -> None:
    """Cast the shard of a weight that FSDP2 is about to gather, unless a cast of it is cached.

    The shards of other layers that FSDP2 gathers under the same root module are cast too, if their
    precomputed scales are fresh and no cast is cached. All casts take one or a few launches, on the
    current stream. On devices where this is not faster than single casts, the function does
    nothing, and the gather casts its shard alone.

    Args:
        layer: the layer whose weight is gathered.
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
