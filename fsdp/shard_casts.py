"""The shards that FSDP2 gathers in float8, cast many in one launch once their scales are known.

On a GPU a launch per weight, on the stream that FSDP2 gathers from, costs more than the cast of a
shard. What is made here waits in the weights' caches; where it is missing or no longer fresh, the
gather casts its shard itself.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from fp8_dist.cast import as_copies
from fp8_dist.config import CopySpec
from fp8_dist.granularity import ROW, TENSOR
from fp8_dist.kernels import fuses_many, quantize_each
from fp8_dist.linear.module import Float8Linear
from fp8_dist.linear.weight_cache import ScaleState
from fp8_dist.torch_internals import (
    fsdp_groups_of_module,
    fsdp_modules_with_extensions,
    is_captured,
)

LARGEST_BUFFER = 2**30  # bytes


def cast_shards(module: nn.Module, layers: Iterable[Float8Linear]) -> None:
    """Cast the shards of layers whose scales were just precomputed, if FSDP2 gathers them.

    Args:
        module: has the FSDP modules. (Layers of others are left to their gathers.)
        layers: those of ``module`` with precomputed scales.

    A launch or a few for all shards of a dtype, on devices where that is faster; elsewhere nothing.
    """
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    groups = [group for part in parts for group in fsdp_groups_of_module(part)]
    gathered = {id(layer) for group in groups for layer in fsdp_modules_with_extensions(group)}
    # By the parameter: FSDP2 asks the first of the layers that share one.
    first: dict[int, Float8Linear] = {}
    for layer in layers:
        if id(layer) in gathered and _keeps_cast(layer):
            first.setdefault(id(layer.weight), layer)
    alike: dict[tuple[Any, ...], list[Float8Linear]] = {}
    for layer in first.values():
        (cast,), shard = layer.config.casts("weight"), layer.float8_weight.shard()
        alike.setdefault((cast, shard.dtype, shard.device), []).append(layer)
    for same in alike.values():
        for part in _parts(same):
            _cast_alike(part)


def _keeps_cast(layer: Float8Linear) -> bool:
    """Whether a cast of the shard is kept for the gather, and is cheaper together with others."""
    weight = layer.float8_weight
    shard, casts = weight.shard(), layer.config.casts("weight")
    return (
        layer.config.cache_float8_shards
        and weight.cache.state is ScaleState.PRECOMPUTED
        and fuses_many(shard)
        and not is_captured(shard)
        and all(cast.granularity in (TENSOR, ROW) for cast in casts)
    )


def _parts(layers: list[Float8Linear]) -> Iterator[list[Float8Linear]]:
    """Layers whose casts share a buffer. It lives as long as any of them, so it has a limit."""
    part: list[Float8Linear] = []
    size = 0
    for layer in layers:
        bytes_ = layer.float8_weight.shard().numel()
        if part and size + bytes_ > LARGEST_BUFFER:
            yield part
            part, size = [], 0
        part.append(layer)
        size += bytes_
    yield part


@torch.inference_mode(False)
@torch.no_grad()
def _cast_alike(layers: list[Float8Linear]) -> None:
    """For layers with one cast, and shards of one dtype and device."""
    (cast,) = layers[0].config.casts("weight")
    shards = [layer.float8_weight.shard().detach() for layer in layers]
    caches = [layer.float8_weight.cache for layer in layers]
    scalings = [cache.scaling for cache in caches]
    multipliers = torch.cat([known[cast][0].reshape(-1) for known in scalings if known])
    of_rows = cast.granularity is ROW
    flat = quantize_each(shards[0], shards[1:], multipliers, cast.dtype, of_rows)
    data = flat.split([shard.numel() for shard in shards])
    for cache, known, shard, qdata in zip(caches, scalings, shards, data, strict=True):
        assert known is not None
        cache.float8 = as_copies(
            shard, [CopySpec(cast)], [qdata.view(shard.shape)], [known[cast][1]]
        )
