"""Tensors that are read on another stream than the one that computed them.

FSDP2 gathers weights on its own streams, where their scales and casts are read.
"""

from collections.abc import Iterable
from typing import Protocol

import torch

from fp8_dist.mesh import Layout


class _Weight(Protocol):
    made: torch.cuda.Event | None

    def shard(self) -> torch.Tensor: ...

    def parameter(self) -> torch.Tensor: ...


def note_made(weights: Iterable[_Weight]) -> None:
    """Let later gathers wait for the scales and casts of weights that this stream computes."""
    on_gpu = [weight for weight in weights if device_of(weight).type == "cuda"]
    if on_gpu:
        event = torch.cuda.current_stream().record_event()
        for weight in on_gpu:
            weight.made = event


def device_of(weight: _Weight) -> torch.device:
    """Return the device on which the scales of a weight are used, even with CPU offload."""
    shard, layout = weight.shard(), Layout.of(weight.parameter())
    offloaded = layout is not None and layout.mesh.device_type != shard.device.type
    return torch.device(layout.mesh.device_type) if layout and offloaded else shard.device


def keep_for_current_stream(tensors: Iterable[torch.Tensor]) -> None:
    """Keep the memory of tensors, once freed, until the current stream has read them.

    The caching allocator would otherwise reuse it at once on the stream that allocated it.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
